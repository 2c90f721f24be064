"""Replicas of stages that do not flush, or do without a stage, are what the study of them says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from decentral.manifest import Manifest, preset_manifest
from decentral.optimizers import Contributor, RoundInfo
from decentral.pipeline.turns import FAR, NEAR, StageSpeed, Turn, Turns

tasks = pytest.importorskip("experiments.piped.tasks", reason="not part of a source distribution")
times = pytest.importorskip("experiments.piped.times", reason="not part of a source distribution")

ROWS = 8


def terms(**tables: dict[str, object]) -> Manifest:
    return preset_manifest(
        "sparseloco",
        model={"hidden": 16, "layers": 4, "heads": 2, "context": 8},
        data={"batch_size": ROWS},
        inner={"steps": 3, "learning_rate": 8e-3},
        **tables,
    )


def test_with_nothing_in_flight_a_step_has_the_very_gradients_of_one_that_flushes() -> None:
    class NothingInFlight(tasks.NoFlushNear):
        lead = 0

    model = tasks.Unrounded(terms(), 4).model()
    wanted, found = [], []
    for gradients, task in ((wanted, tasks.Unrounded(terms(), 4)), (found, NothingInFlight(terms(), 4))):
        for step in range(2):
            model.zero_grad()
            task.loss(model, 3, step).backward()
            gradients += [parameter.grad.clone() for parameter in model.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))


class Chain(nn.Module):
    """A number a piece, which multiplies; the loss is half the mean of the squares."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.ParameterList(torch.tensor(1.0 + at / 10) for at in range(2 + tasks.STAGES))

    def segments(self) -> list[tuple[object, tuple[()]]]:
        return [(lambda states, factor=factor: states * factor, ()) for factor in self.factors]

    def loss(self, made: Tensor, _: Tensor) -> Tensor:
        return made.square().mean() / 2


def in_flight(stage: int, lead: int) -> int:
    """Return how many of the next step went forward before this step's last went back, by the order of turns."""
    turns, forward = Turns(stage, tasks.STAGES, 2 * ROWS, lead), 0
    while (turn := turns.next()[0]) != Turn(False, ROWS - 1):
        turns.take(turn)
        forward += turn.forward
    return min(forward - ROWS, ROWS - 1)  # of one later step at most, and not all of it


@pytest.mark.parametrize("lead", [NEAR, FAR])
def test_what_is_in_flight_goes_forward_through_old_weights_and_back_through_new_ones(lead: int) -> None:
    class NoFlush(tasks.NoFlushNear):
        pass

    NoFlush.lead = lead
    task, chain = NoFlush(terms(), 4), Chain()
    stage_of = [0, 0, 1, 2, 3, 3]
    inputs = torch.arange(1.0, ROWS + 1)
    task._text.tokens = lambda rank, step: inputs
    task.loss(chain, 3, 0)
    old = [factor.item() for factor in chain.factors]
    with torch.no_grad():
        for factor in chain.factors:
            factor.mul_(0.9).grad = None
    new = [factor.item() for factor in chain.factors]
    task.loss(chain, 3, 1)

    early = [in_flight(stage, lead) for stage in range(tasks.STAGES)]
    wanted = [0.0] * len(new)
    for row, value in enumerate(inputs.tolist()):
        given = []
        for at, stage in enumerate(stage_of):
            given.append(value)
            value *= (old if row < early[stage] else new)[at]
        gradient = value / ROWS
        for at in reversed(range(len(new))):
            wanted[at] += gradient * given[at]
            gradient *= new[at]
    assert [factor.grad.item() for factor in chain.factors] == pytest.approx(wanted, rel=1e-5)


def test_each_round_begins_with_nothing_in_flight() -> None:
    task, model = tasks.NoFlushFar(terms(), 4), tasks.Whole(terms(), 4).model()
    for step in range(6):
        task.loss(model, 2, step).backward()
        assert list(task._in_flight) == ([] if step in {2, 5} else [(2, step + 1)])


def test_a_stage_that_is_gone_has_no_gradient_and_the_others_have() -> None:
    task, model = tasks.BothSkipThroughout(terms(), 4), tasks.Whole(terms(), 4).model()
    task.loss(model, 2, 0).backward()
    still = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert still == {name for name, _ in model.named_parameters() if name.startswith("model.layers.1.")}


def test_a_stage_is_the_mean_of_those_that_trained_it() -> None:
    layout = {"model.embed_tokens.weight": (1,), **{f"model.layers.{n}.weight": (1,) for n in range(4)}, "norm": (1,)}
    rows = torch.tensor([[1.0, 1, 1, 1, 1, 1], [3.0, 3, 9, 3, 3, 3]])
    told = (Contributor(b"a", summary=bytes([1, 1, 1, 1])), Contributor(b"b", summary=bytes([1, 0, 1, 1])))
    info = RoundInfo(contributors=told, names=tuple(layout), shapes=tuple(layout.values()))
    after, _ = tasks.ByStages(lr=1.0).outer_step(torch.zeros(6), {"change": rows}, {}, info)
    assert after.tolist() == [-2, -2, -1, -2, -2, -2]


def test_without_a_flush_equal_stages_never_wait() -> None:
    for count in (2, 3, 4):
        assert times.seconds_without_flush([StageSpeed(1.0, 2.0)] * count, 12, 1) == pytest.approx(36.0)
