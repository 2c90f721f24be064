"""An outer step is given a mean whose values may never be made: the same bits as by way of the values."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from decentral.errors import NonFiniteError
from decentral.optimizers import OuterMethod, RoundInfo
from decentral.optimizers.base import State
from decentral.optimizers.diloco import DiLoCo
from decentral.optimizers.fedbuff import FedBuff
from decentral.optimizers.local_sgd import LocalSGD
from decentral.optimizers.mean import LazyMean
from decentral.optimizers.shared_moments import DESLoc
from decentral.optimizers.sparseloco import SparseLoCo
from decentral.optimizers.steps import sgd
from decentral.replica.apply import GatherReader, outer_step
from decentral.replica.measures import Sample
from decentral.replica.replica import OuterStep, Replica
from decentral.replica.weights import OVERFLOW
from decentral.wire.frames import Frame
from decentral.wire.messages import Record
from tests.kit.aggregated import NUMEL, SCHEMA, SPARSE, randn, replica, round_of
from tests.kit.tables import AGGREGATIONS, rule_of

CHAINS = [SPARSE, "threshold(k=64, sample=0.01) >> int8(block=64)", "dct(k=32, chunk=4096)", "int8(block=64)", "none"]
METHODS = [SparseLoCo(lr=0.7), LocalSGD(), FedBuff(lr=0.5)]


class Remembered(LazyMean):
    """Those that outer steps were given."""

    all: ClassVar[list[LazyMean]] = []

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.all.append(self)


def given_and_read(means: list[LazyMean]) -> tuple[int, int]:
    """How many there were, and of how many the values were made."""
    return len(means), sum(one.is_made for one in means)


@pytest.fixture
def means(monkeypatch: pytest.MonkeyPatch) -> list[LazyMean]:
    monkeypatch.setattr("decentral.replica.apply.LazyMean", Remembered)
    monkeypatch.setattr(Remembered, "all", [])
    return Remembered.all


def replica_with(method: Any, spelling: str = "mean", chain: str = SPARSE) -> Replica:  # Any: OuterMethod, or alike
    given = replica(rule_of(spelling), chain)
    return Replica(SCHEMA, [randn(99)], method, given.codec, given.codec, rule=given.rule)


def kept_and_forgetful(method: Any, spelling: str = "mean", chain: str = SPARSE) -> tuple[Replica, Replica]:
    """Two alike, of which the second has no room for what frames hold."""
    kept, forgetful = (replica_with(method, spelling, chain) for _ in range(2))
    forgetful.contents.unpacked.capacity = 0
    return kept, forgetful


def arrived(given: Replica, record: Record, frames: dict[bytes, Frame]) -> OuterStep:
    """The step of a replica that has kept what the frames hold."""
    for frame in frames.values():
        given.contents.payloads(frame)
    return outer_step(given, record, frames)


@pytest.mark.parametrize(
    ("method", "spelling", "chain", "threads"),
    [
        *((METHODS[0], spelling, SPARSE, 1) for spelling in AGGREGATIONS),
        *((METHODS[0], "norm_clip", chain, threads) for chain in CHAINS for threads in (1, 3)),
        *((method, "norm_clip", SPARSE, 1) for method in METHODS[1:]),
    ],
)
def test_both_ways_have_the_same_bits(
    means: list[LazyMean], monkeypatch: pytest.MonkeyPatch, method: object, spelling: str, chain: str, threads: int
) -> None:
    monkeypatch.setattr("decentral.tensors.threads.WORTH_IT", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        kept, forgetful = kept_and_forgetful(method, spelling, chain)
        record, frames = round_of(kept.codec, [randn(n) * (n + 1) for n in range(8)])
        one, other = arrived(kept, record, frames), outer_step(forgetful, record, frames)
    finally:
        torch.set_num_threads(before)
    assert one.digest == other.digest
    needs = kept.rule.needs
    assert needs == "rows" or not torch.equal(one.after_N, one.before_N), "a median of few is zero"
    assert one.channels == other.channels == {"change"}
    assert one.came_S is not None
    assert other.came_S is not None
    assert torch.equal(one.came_S, other.came_S)
    assert given_and_read(means) == (0 if needs == "rows" else 1, 0)


@pytest.mark.parametrize("method", [DiLoCo(), DESLoc(first_moment=1, second_moment=1)], ids=lambda one: one.name)
def test_a_method_with_a_state_has_the_same_bits_too(means: list[LazyMean], method: OuterMethod) -> None:
    kept, forgetful = kept_and_forgetful(method)
    states = [torch.ones(NUMEL)] * (len(kept.due(0)) - 1)
    record, frames = round_of(kept.codec, [randn(n) for n in range(3)], states)
    one, other = arrived(kept, record, frames), outer_step(forgetful, record, frames)
    assert one.digest == other.digest
    assert all(torch.equal(one.state[name], other.state[name]) for name in other.state)
    assert one.channels == other.channels
    assert one.came_S is not None
    assert other.came_S is not None
    assert torch.equal(one.came_S, other.came_S)
    assert given_and_read(means) == (1, int(method.name == "diloco"))


def test_a_sum_beyond_float32_is_averaged_as_ever(means: list[LazyMean]) -> None:
    given = replica_with(SparseLoCo(), chain="none")
    record, frames = round_of(given.codec, [torch.full((NUMEL,), 2e38)] * 4)
    step = arrived(given, record, frames)
    assert given_and_read(means) == (1, 1)
    torch.testing.assert_close(step.after_N, torch.full((NUMEL,), -2e38))


@pytest.mark.parametrize("lr", [float("nan"), float("inf")], ids=str)
def test_a_step_of_a_rate_that_is_none_moves_nothing(monkeypatch: pytest.MonkeyPatch, lr: float) -> None:
    method = SparseLoCo()
    object.__setattr__(method, "lr", lr)
    given = replica_with(method)
    step = arrived(given, *round_of(given.codec, [randn(n) for n in range(3)]))
    assert step.unmoved == "outer_step gave NaN or Inf for the anchor"
    assert step.after_N is step.before_N


class Reads(SparseLoCo):
    """Reads the mean, and goes on when that fails."""

    def outer_step(self, anchor: Tensor, received: State, state: State, info: RoundInfo) -> tuple[Tensor, Any]:
        with suppress(NonFiniteError):
            return anchor - received["change"], {}
        return anchor + 1.0, {}


class Ignores(SparseLoCo):
    """Looks at nothing that came."""

    def outer_step(self, anchor: Tensor, received: State, state: State, info: RoundInfo) -> tuple[Tensor, Any]:
        return anchor + 1.0, {}


@pytest.mark.parametrize("method", [SparseLoCo(), DiLoCo(), Reads(), Ignores()], ids=lambda one: type(one).__name__)
def test_a_mean_that_cannot_be_made_is_no_error_of_the_method(
    monkeypatch: pytest.MonkeyPatch, method: OuterMethod
) -> None:
    monkeypatch.setattr(GatherReader, "scales", lambda self, frames, *others: [1e38] * len(frames))
    kept, forgetful = kept_and_forgetful(method, chain="none")
    record, frames = round_of(kept.codec, [torch.full((NUMEL,), 1e38)] * 2)
    one, other = arrived(kept, record, frames), outer_step(forgetful, record, frames)
    assert one.unmoved == other.unmoved == OVERFLOW
    assert one.digest == other.digest == kept.digests[0]


class Plain(SparseLoCo):
    """As somebody would write it who knows of tensors alone, and returns what it was given."""

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        return {"last": torch.zeros_like(anchor)}

    def outer_step(self, anchor: Tensor, received: State, state: State, info: RoundInfo) -> tuple[Tensor, Any]:
        change = received["change"]
        assert change.shape == anchor.shape
        rows_KN = torch.stack([change, state["last"]])
        rows_KN[0] += torch.where(change > 0, change, torch.zeros_like(change))
        change.clamp_(-0.01, 0.01)  # what was read has values of its own: a step goes by them from now on
        return sgd(anchor, change, 1.0) - rows_KN.sum(0) * 0.5, {"last": change}


def test_a_method_that_knows_of_tensors_alone_takes_it_for_one() -> None:
    kept, forgetful = kept_and_forgetful(Plain())
    for number in range(2):
        record, frames = round_of(kept.codec, [randn(n + 9 * number) for n in range(3)], number=number)
        steps = [arrived(kept, record, frames), outer_step(forgetful, record, frames)]
        assert not steps[0].unmoved
        assert steps[0].digest == steps[1].digest
        assert type(steps[0].state["last"]) is Tensor, "no frame is held by what is kept"
        assert torch.equal(steps[0].state["last"], steps[1].state["last"])
        for peer, step in zip((kept, forgetful), steps, strict=True):
            peer.install(step)


@dataclass(frozen=True, slots=True)
class Careful(SparseLoCo):
    """As somebody would write it who changes what it derives from."""

    name: ClassVar[str] = "careful"
    preset: ClassVar[None] = None

    def outer_step(
        self, anchor: torch.Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return anchor - received["change"].clamp(-0.01, 0.01), {}


def test_an_outer_step_of_ones_own_is_asked_though_an_ancestor_has_another() -> None:
    """It was on those peers only that had no room for what came: a fork."""
    kept, forgetful = kept_and_forgetful(Careful())
    record, frames = round_of(kept.codec, [randn(n) for n in range(3)])
    one, other = arrived(kept, record, frames), outer_step(forgetful, record, frames)
    assert one.digest == other.digest
    assert float((one.after_N - one.before_N).abs().max()) <= 0.0101


def test_values_of_the_sample_come_together_from_parts() -> None:
    for numel in (1000, 40_000):
        sample, value = Sample(numel), randn(0).repeat(9)[:numel]
        parts = [sample.of_part(value[start : start + 700], start) for start in range(0, numel, 700)]
        assert torch.equal(torch.cat(parts), sample.of(value))
