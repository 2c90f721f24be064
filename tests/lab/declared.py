"""A small study of digits, who runs cells in this process, and a small model of text."""

from __future__ import annotations

import functools
import json

from decentral.lab import laboratory
from decentral.lab.cells import Cell, Curve, Point
from decentral.lab.plan import Plan
from decentral.lab.running import Outcome, run_cell
from decentral.lab.terms import parse_study
from decentral.tasks.corpus import Corpus, load_corpus

TEXT = """
[study]
name = "digits"
task = "digits"
peers = 3
rounds = 4
learning_rates = [0.003, 0.03]
seeds = [1, 2, 3]
points = 2

[model]
hidden = 16

[inner]
steps = 6
warmup = 2

[[method]]
name = "diloco"
preset = "diloco"

[[reference]]
name = "data-parallel"
kind = "data-parallel"

[[control]]
name = "flipped"
of = "diloco"

[[link]]
name = "home"
rate_mbit = 20
parameters = 1e8
"""


def plan(text: str = TEXT) -> Plan:
    return Plan(parse_study(text))


class Here(laboratory.Here):
    """It tells what it ``ran``, in order."""

    def __init__(self) -> None:
        super().__init__(run_cell)
        self.ran: list[str] = []

    def take(self) -> list[tuple[Cell, Outcome]]:
        over = super().take()
        self.ran += [cell.id for cell, _ in over]
        return over


def ended(loss: float | None) -> Outcome:
    """As if a cell had come to this loss; None: to no number."""
    curve = Curve((Point(1.0, 1.0, 1, 1.0, 1.0, loss),), 1.0, 10)
    return Outcome("done" if loss is not None else "diverged", "", curve)


def of(outcome: Outcome) -> str:
    """All that is not about this machine's time."""
    told = outcome.to_json()
    del told["totals"]["seconds"]
    return json.dumps(told)


# ---- replicas that learn text ----

PEERS = 3
SIZE = {"hidden": 16, "layers": 1, "heads": 2, "context": 16}


@functools.cache
def corpus() -> Corpus:
    return load_corpus()
