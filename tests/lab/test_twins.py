"""Updates of honest peers, and copies of them, as rounds see them while a model is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from decentral.manifest import preset_manifest
from decentral.manifest.presets import Scale, suit
from decentral.observe.contributions import Scrutiny
from decentral.replica.measures import Measure
from decentral.trial.own_model import Build, OwnCourse
from experiments.defaults.problems import problem
from tests.kit.tables import long_but

STEPS, ROUNDS, LENGTH = 12, 14, 100  # the outer step overshoots in the first rounds of a run of so many
NOISE = 0.01
ALIKE = {"gpt-0.05M": (2, 3, 4, 8), "uneven": (3, 4, 8, 4)}  # by a pull that all share, and by data that some share
CASES = [(name, peers, seed) for seed in range(3) for name, counts in ALIKE.items() for peers in counts[seed % 2 :: 2]]
FEW = [("uneven", 3, 0)]


def updates(build: Build, peers: int, first: int) -> list[list[Tensor]]:
    """Pseudo-gradients by round and peer, by what ``decentral init`` writes."""
    terms = preset_manifest("diloco", rounds=LENGTH, steps=STEPS, run={"salt": "0"})
    terms = suit("diloco", terms, LENGTH, Scale(parameters=50_000, peers=peers, rate=2.5e6))
    course, found = OwnCourse(build, terms, peers, first), []
    for peer in course._peers:
        plain: Callable[..., object] = peer.take

        def taken(*given: object, take: Callable[..., object] = plain) -> object:
            made = take(*given)
            found.append(made.gradient_N.clone())
            return made

        peer.take = taken
    course.go(ROUNDS * STEPS)
    return [found[at : at + peers] for at in range(0, len(found), peers)]


def named(by_round: Sequence[Sequence[Tensor]]) -> list[tuple[int, object]]:
    """Rounds at which two are named, and their cosine."""
    scrutiny, found = Scrutiny(), []
    for number, each in enumerate(by_round, 1):
        ids = [bytes([place]) * 32 for place in range(len(each))]
        measured = {peer: Measure.of((one,), one.numel()) for peer, one in zip(ids, each, strict=True)}
        record: Any = SimpleNamespace(round=number, outer_step=number)
        found += [(number, fields["cosine"]) for _, fields in scrutiny._twins(record, ids, measured)]
    return found


@pytest.mark.parametrize("case", long_but(FEW, CASES), ids=str)
def test_honest_peers_are_never_named_and_copies_are_within_six_rounds(case: tuple[str, int, int]) -> None:
    name, peers, seed = case
    honest = updates(problem(name), peers, 100 * seed)
    assert named(honest) == []
    generator = torch.Generator().manual_seed(seed)

    def noisy(one: Tensor, share: float) -> Tensor:
        noise = torch.randn(one.shape, generator=generator)
        return one + share * one.norm() / noise.norm() * noise

    for share in (0.0, NOISE):
        copied = [[*each, noisy(each[0], share)] for each in honest]
        assert named(copied)[0][0] <= 6
