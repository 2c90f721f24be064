"""Every method with its preset's terms stays stable on a stiff quadratic, by itself and through its compressor.

A debt is repeated until it is sent: while a coordinate waits, each round learns the same again and adds it, so that
what is sent in the end is up to 1/(1-beta) rounds' worth, 20 for beta 0.95. Where a round solves a coordinate by a
share h, that overshoots its optimum by up to 20*h, and may diverge from 20*h = 2 on. So methods whose preset owes, or
that owe by themselves, are held to inner steps with h of at most 0.1, and the last tests show what happens beyond.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from decentral.manifest import preset_manifest
from decentral.optimizers.masha import Masha
from decentral.optimizers.noloco import NoLoCo
from decentral.optimizers.slowmo import Delayed
from tests.kit.tables import GOSSIPS, PRESETS, covering, long_but
from tests.laws.quadratic import Descent, Lossy, with_defaults

ROUNDS = 300
LOSSY_ROUNDS = 200  # a sparsifier takes a thousand times what an outer step does
OWING_RATE = 0.01  # of inner steps where contributions are owed: a round solves a coordinate by 0.1 at most
OVERSHOOT = 4.0  # of the first loss: momentum that swings past the optimum, and no more


@dataclasses.dataclass(frozen=True)
class Course:
    """What became of a run."""

    losses: list[float]
    spreads: list[float]

    def fifth(self, values: list[float], number: int) -> float:
        """The mean over one fifth of the rounds."""
        each = max(1, len(values) // 5)
        return math.fsum(values[number * each : (number + 1) * each]) / each

    @property
    def is_stable(self) -> bool:
        """It ends lower than it began, nowhere far above, and does not rise again in its second half."""
        first, half, last = self.losses[0], self.fifth(self.losses, 2), self.fifth(self.losses, 4)
        return last < first and max(self.losses) < OVERSHOOT * first and last < 1.5 * half + 0.01 * first

    @property
    def stays_together(self) -> bool:
        """The variance between replicas does not grow: noise keeps it up, and the pull down."""
        return self.fifth(self.spreads, 4) <= 2 * self.fifth(self.spreads, 1)


def course(run: Descent, rounds: int = ROUNDS) -> Course:
    found = Course([run.loss()], [run.spread()])
    for _ in range(rounds):
        run.round()
        found.losses.append(run.loss())
        found.spreads.append(run.spread())
        if not found.losses[-1] < 1e6:  # NaN, too
            break
    return found


@pytest.mark.parametrize("peers", [2, pytest.param(64, marks=pytest.mark.long)])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_method_with_its_presets_terms_does_not_diverge(preset: str, peers: int):
    method = with_defaults(preset)
    owes = "debt" in method.init(torch.zeros(1))
    found = course(Descent(method, peers, rate=OWING_RATE if owes else 1.0))
    assert found.is_stable, found.losses[::50]
    assert preset not in GOSSIPS or found.stays_together, found.spreads[::50]


def through_its_compressor(preset: str, peers: int, rate: float) -> Course:
    clips = preset_manifest(preset).outer.norm_clip == "median"
    return course(Descent(with_defaults(preset), peers, Lossy.of(preset), clips, rate), LOSSY_ROUNDS)


@pytest.mark.parametrize("peers", [2, pytest.param(8, marks=pytest.mark.long)])
@pytest.mark.parametrize("preset", long_but(covering(PRESETS), PRESETS))
def test_nor_does_it_through_the_compressor_and_the_feedback_that_its_preset_names(preset: str, peers: int):
    found = through_its_compressor(preset, peers, OWING_RATE if Lossy.of(preset).feedback.sender else 1.0)
    assert found.is_stable, found.losses[::20]
    assert preset not in GOSSIPS or found.stays_together, found.spreads[::20]


def test_what_is_known_to_diverge_is_seen_to():
    """A round of delay with the momentum that is usual without one."""
    assert not course(Descent(Delayed(lr=0.7, momentum=0.9), 8)).is_stable


def test_replicas_that_drift_apart_are_seen_while_their_mean_converges(monkeypatch: pytest.MonkeyPatch):
    """The reference code's terms, which NoLoCo refuses: their mean loss looks well."""
    monkeypatch.setattr(NoLoCo, "__post_init__", lambda self: None)
    assert not course(Descent(NoLoCo(alpha=0.9, beta=0.7, gamma=0.7), 8)).stays_together


def test_what_is_owed_overshoots_where_a_round_solves_a_coordinate():
    assert not through_its_compressor("sparseloco", 2, 1.0).is_stable


@pytest.mark.parametrize(
    ("choose", "parts", "rate", "stable"),
    [
        ("largest", 4, 1.0, True),
        ("largest", 8, 1.0, False),
        ("largest", 64, OWING_RATE, True),
        ("random", 2, 1.0, True),
        ("random", 4, 1.0, False),
        ("random", 16, OWING_RATE, True),
        ("random", 32, OWING_RATE, False),
    ],
)
def test_what_masha_owes_overshoots_where_its_text_says_so(choose: str, parts: int, rate: float, stable: bool):
    assert course(Descent(Masha(choose=choose, parts=parts), 8, rate=rate)).is_stable == stable
