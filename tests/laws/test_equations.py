"""Every method moves an anchor step by step as its equation does: the one reference, in float64 and from the paper.

`decentral.simulate.equations` has it, apart from the methods; simulated runs are judged by the same one. Here each
contributor sends a change of its own, comes late by an age of its own and says what tokens and steps are behind it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from decentral.optimizers import Contributor, OuterMethod, RoundInfo
from decentral.simulate.equations import EQUATIONS, NOT_LINEAR, PULLS, Averaged, Stood
from decentral.wire.messages import FrameRef
from tests.kit.stepping import State, received_of, swap, told_of
from tests.kit.tables import ALONG_DIRECTIONS, topology_of

# Shape suffixes: N = elements of one tensor; K = contributors; float64.

NUMEL = 41
NEAR = {"rtol": 1e-6, "atol": 1e-6}  # some methods add what contributors sent in float32
AGES = (
    (0, 0, 0),
    (0, 3, 1),
    (2,),
    (0, 0),
    (5, 5, 5),
    (0, 1),
    (7, 0, 9),
    (0, 0, 0, 0),
    (1, 0, 0),
)  # who comes, how late
TOKENS = ((100, 10), (50, 10), (300, 10), (90, 0))  # and inner steps


by_rounds = pytest.mark.methods(
    lambda spelling: spelling.split()[0] in EQUATIONS and spelling.split()[0] not in ALONG_DIRECTIONS
)
along_directions = pytest.mark.methods(lambda spelling: spelling.split()[0] in ALONG_DIRECTIONS)
in_pairs = pytest.mark.methods(
    lambda spelling: topology_of(spelling) == "pair" and spelling.split()[0] not in NOT_LINEAR
)


def changes_of(number: int, count: int) -> list[Tensor]:
    """Of different lengths, that agree a little or point against each other."""
    random = torch.Generator().manual_seed(number)
    common_N = torch.randn(NUMEL, generator=random, dtype=torch.float64)
    rows_KN = torch.randn(count, NUMEL, generator=random, dtype=torch.float64)
    return [(0.1 + n) * (row_N + (-1) ** n * 0.5 * common_N) for n, row_N in enumerate(rows_KN)]


def stepped(
    outer: OuterMethod, x_N: Tensor, state: State, number: int, ages: Sequence[int]
) -> tuple[Tensor, State, Averaged]:
    """One step, as `Replica` makes it, and what the equation is told of it."""
    changes = changes_of(number, len(ages))
    spent = zip(ages, TOKENS, strict=False)
    said = [told_of(outer, n, change_N, number) for n, change_N in enumerate(changes)]
    told = tuple(
        replace(one, age=age, tokens=tokens, steps=steps)
        for one, (age, (tokens, steps)) in zip(said, spent, strict=True)
    )
    refs = [FrameRef(one.peer, bytes(32), 0, one.steps, one.tokens, 0, one.summary) for one in told]
    weights = tuple(outer.weights(told, (1.0,) * len(told), state))
    info = RoundInfo(number, told, weights, ((NUMEL,),), ("weight",))
    if not any(weights):
        averaged = Averaged(torch.zeros(NUMEL, dtype=torch.float64), refs, torch.stack(changes), ages)
        return x_N, dict(outer.nobody_counts(state, info)), averaged
    weight_K1 = torch.tensor(weights, dtype=torch.float64)[:, None]
    mean_N = (weight_K1 * torch.stack(changes)).sum(0) / weight_K1.sum()
    after_N, kept = outer.outer_step(x_N, received_of(outer, changes, mean_N, number), state, info)
    return after_N, kept, Averaged(mean_N, refs, torch.stack(changes), ages)


@by_rounds
def test_each_step_moves_the_anchor_as_the_equation_says(outer: OuterMethod):
    x_N = first_N = torch.linspace(-1, 1, NUMEL, dtype=torch.float64)
    state: State = outer.init(x_N)
    run: list[Averaged] = []
    for number, ages in enumerate(AGES):
        x_N, state, averaged = stepped(outer, x_N, state, number, ages)
        run.append(averaged)
        moved_N = EQUATIONS[outer.name](run, dataclasses.asdict(outer))  # type: ignore[call-overload]  # a dataclass
        torch.testing.assert_close(x_N - first_N, moved_N, **NEAR)
    assert float(moved_N.abs().max()) > 1e-3


@along_directions
def test_an_anchor_moves_along_directions_as_derivatives_say(outer: OuterMethod):
    random = torch.Generator().manual_seed(0)
    x_N, run = torch.zeros(300), []
    for number in range(5):
        said = [bytes(torch.randint(256, (12 + n,), generator=random).tolist()) for n in (4, 0, 40)]
        refs = [FrameRef(bytes([n]) * 32, bytes(32), 0, 1, 1, 0, one) for n, one in enumerate(said)]
        told = tuple(Contributor(ref.peer, summary=ref.summary) for ref in refs)
        mean_N = torch.stack([outer.rebuilt(one, {"weight": (30, 10)}) for one in told]).mean(0)
        x_N, _ = outer.outer_step(x_N, {"change": mean_N}, {}, RoundInfo(number, told))
        run.append(Averaged(torch.zeros(300, dtype=torch.float64), refs, name="weight"))
        moved_N = EQUATIONS[outer.name](run, dataclasses.asdict(outer))  # type: ignore[call-overload]  # a dataclass
        torch.testing.assert_close(x_N.double(), moved_N, rtol=1e-4, atol=1e-3)
    assert float(moved_N.abs().max()) > 0.1


@in_pairs
@pytest.mark.parametrize("sent", [lambda one_N: one_N, lambda one_N: one_N.half().double()], ids=["exact", "fp16"])
def test_a_pair_moves_in_sum_as_the_equation_says_and_one_alone_by_itself(
    outer: OuterMethod, sent: Callable[[Tensor], Tensor]
):
    """Even through lossy compression: the pull is made of what was sent, so both of a pair cancel theirs."""
    anchors = changes_of(99, 3)
    states: list[State] = [outer.init(x_N) for x_N in anchors]
    for number, (pair, alone) in enumerate([((0, 1), 2), ((2, 0), 1), ((1, 2), 0), ((0, 1), 2), ((1, 2), 0)]):
        sign = 1 if outer.contribute(torch.ones(1), torch.zeros(1)) > 0 else -1
        changes = [sign * change_N for change_N in changes_of(number, 3)]
        for group in (pair, (alone,)):
            stood = [Stood(anchors[n], changes[n], states[n]) for n in group]
            told_N = sum(PULLS[outer.name](one, dataclasses.asdict(outer)) for one in stood)  # type: ignore[call-overload]
            given = [[of[n] for n in group] for of in (anchors, changes, states)]
            for n, (after_N, kept) in zip(group, swap(outer, *given, sent), strict=True):
                anchors[n], states[n] = after_N, kept
            moved_N = sum(anchors[n] - one.before_N for n, one in zip(group, stood, strict=True))
            torch.testing.assert_close(moved_N, told_N, rtol=0, atol=1e-10)
