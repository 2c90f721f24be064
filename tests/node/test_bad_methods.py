"""A method that returns what nobody can use: the run stands as it was, on every peer alike, and says whose fault."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from decentral.optimizers.synchronous.diloco import DiLoCo
from tests.lab.learners import Learner
from tests.lab.nodes import Lab, tiny_model
from tests.rounds.test_healing import settle

Bad = Callable[..., Any]


def bad(name: str, returns: Bad) -> DiLoCo:
    """DiLoCo, but for one function."""
    made: type[DiLoCo] = dataclasses.make_dataclass("Bad", [], bases=(DiLoCo,), frozen=True, namespace={name: returns})
    return made(lr=0.5, momentum=0.0)


FAULTS = {
    "negative weights": bad("weights", lambda self, told, given, state: [-1.0] * len(told)),
    "weights that are NaN": bad("weights", lambda self, told, given, state: [math.nan] * len(told)),
    "weights that are infinite": bad("weights", lambda self, told, given, state: [math.inf] * len(told)),
    "too few weights": bad("weights", lambda self, told, given, state: given[1:]),
    "no weights": bad("weights", lambda self, told, given, state: None),
    "an anchor that is NaN": bad("outer_step", lambda self, x, received, state, info: (x * math.nan, dict(state))),
    "an anchor too long": bad("outer_step", lambda self, x, received, state, info: (torch.cat([x, x]), dict(state))),
    "no state": bad("outer_step", lambda self, x, received, state, info: (x - received["change"], {})),
    "an error": bad("outer_step", lambda self, x, received, state, info: (x, {"momentum": state["velocity"]})),
}


@pytest.mark.parametrize("exchange", ["gather", "reduce"])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_method_returns_and_nobody_can_use_moves_nothing_and_ends_no_process(
    run_lab: Any, terms: Any, exchange: str, fault: str
) -> None:
    async def script(lab: Lab) -> None:
        for _ in range(3):
            lab.add(kind=Learner)
        await settle(lab)
        before = lab.members[0].node.replica.anchors[0]
        for member in lab.members:
            member.node.replica.method, member.idle = FAULTS[fault], False
        await lab.rounds(2)
        await settle(lab)
        for member in lab.members:
            assert torch.equal(member.node.replica.anchors[0], before)
            told = [fields for event, fields in member.events if event == "unmoved"]
            assert len(told) >= 2
            assert {one["method"] for one in told} == {"diloco"}
            assert all(one["why"].startswith(("weights", "outer_step")) for one in told)
            member.node.replica.method, member.idle = DiLoCo(lr=0.5, momentum=0.0), False
        await lab.rounds(2)
        lab.check_equal()
        assert not torch.equal(lab.members[0].node.replica.anchors[0], before)

    run_lab(terms("diloco").changed(exchange={"kind": exchange}), script, make_model=tiny_model)
