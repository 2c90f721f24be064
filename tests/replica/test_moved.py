"""A step that is ``anchor - mean * rate`` has the same bits made tensor by tensor as by way of the mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from decentral.optimizers import RoundInfo, make_aggregation
from decentral.optimizers.base import State
from decentral.optimizers.diloco import DiLoCo
from decentral.optimizers.fedbuff import FedBuff
from decentral.optimizers.local_sgd import LocalSGD
from decentral.optimizers.shared_moments import DESLoc
from decentral.optimizers.sparseloco import SparseLoCo
from decentral.replica.measures import Sample
from decentral.replica.replica import Replica
from tests.laws.tables import AGGREGATIONS, rule_of
from tests.replica.test_aggregation import NUMEL, SCHEMA, SPARSE, randn, replica, round_of

CHAINS = [SPARSE, "threshold(k=64, sample=0.01) >> int8(block=64)", "dct(k=32, chunk=4096)", "int8(block=64)", "none"]
METHODS = [SparseLoCo(lr=0.7), LocalSGD(), FedBuff(lr=0.5)]


class Asked:
    """How often a step was made tensor by tensor, and how often it was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = self.made = 0
        moved = type(replica(make_aggregation("mean", {}), "none").gathering).moved

        def looked(*args: object) -> object:
            found = moved(*args)  # type: ignore[arg-type]
            self.asked, self.made = self.asked + 1, self.made + (found is not None)
            return found

        monkeypatch.setattr("decentral.replica.apply.GatherReader.moved", looked)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(monkeypatch)


def with_method(given: Replica, method: object) -> Replica:
    return Replica(
        SCHEMA,
        [randn(99)],
        method,  # type: ignore[arg-type]
        given.codec,
        given.codec,
        rule=given.rule,
    )


@pytest.mark.parametrize(
    ("method", "spelling", "chain", "threads"),
    [
        *((METHODS[0], spelling, SPARSE, 1) for spelling in AGGREGATIONS),
        *((method, "norm_clip", chain, threads) for method in METHODS for chain in CHAINS for threads in (1, 3)),
    ],
)
def test_both_ways_have_the_same_bits(
    ways: Asked, monkeypatch: pytest.MonkeyPatch, method: object, spelling: str, chain: str, threads: int
) -> None:
    monkeypatch.setattr("decentral.tensors.threads.WORTH_IT", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rule = rule_of(spelling)
        kept, forgetful = (with_method(replica(rule, chain), method) for _ in range(2))
        forgetful.contents.unpacked.capacity = 0
        record, frames = round_of(kept.codec, [randn(n) * (n + 1) for n in range(8)])
        for frame in frames.values():
            kept.contents.payloads(frame)
        one, other = kept.outer_step(record, frames), forgetful.outer_step(record, frames)
    finally:
        torch.set_num_threads(before)
    assert one.digest == other.digest
    assert rule.needs == "rows" or not torch.equal(one.after_N, one.before_N), "a median of few is zero"
    assert one.channels == other.channels == {"change"}
    assert one.came_S is not None
    assert other.came_S is not None
    assert torch.equal(one.came_S, other.came_S)
    assert (ways.asked, ways.made) == (2, 0 if rule.needs == "rows" else 1)


@pytest.mark.parametrize("method", [DiLoCo(), DESLoc(first_moment=1, second_moment=1)], ids=lambda one: one.name)
def test_a_method_with_a_state_goes_by_the_mean(ways: Asked, method: object) -> None:
    given = with_method(replica(make_aggregation("mean", {}), "none"), method)
    states = [torch.ones(NUMEL)] * (len(given.due(0)) - 1)
    given.outer_step(*round_of(given.codec, [randn(n) for n in range(3)], states))
    assert ways.asked == 0


def test_a_fragment_of_nothing_goes_by_the_mean() -> None:
    contents = replica(make_aggregation("mean", {}), "none").gathering
    assert contents.moved([], [], b"", (torch.zeros(0), 1.0), Sample(0)) is None


def test_a_sum_beyond_float32_is_averaged_as_ever(ways: Asked) -> None:
    given = with_method(replica(make_aggregation("mean", {}), "none"), SparseLoCo())
    record, frames = round_of(given.codec, [torch.full((NUMEL,), 2e38)] * 4)
    for frame in frames.values():
        given.contents.payloads(frame)
    step = given.outer_step(record, frames)
    assert (ways.asked, ways.made) == (1, 0)
    torch.testing.assert_close(step.after_N, torch.full((NUMEL,), -2e38))


@pytest.mark.parametrize("told", [float("nan"), float("inf"), 0.0, -1.0, "fast", None, 1e300])
def test_a_rate_that_is_none_is_not_gone_by(ways: Asked, monkeypatch: pytest.MonkeyPatch, told: object) -> None:
    def rate(self: SparseLoCo, info: RoundInfo) -> object:
        return told

    given = with_method(replica(make_aggregation("mean", {}), SPARSE), SparseLoCo())
    record, frames = round_of(given.codec, [randn(n) for n in range(3)])
    for frame in frames.values():
        given.contents.payloads(frame)
    wanted = given.outer_step(record, frames).digest
    monkeypatch.setattr(SparseLoCo, "rate", rate)
    assert given.outer_step(record, frames).digest == wanted
    assert ways.made == 1


def test_a_rate_that_raises_is_not_gone_by(ways: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    given = with_method(replica(make_aggregation("mean", {}), SPARSE), SparseLoCo())
    record, frames = round_of(given.codec, [randn(n) for n in range(3)])
    monkeypatch.setattr(SparseLoCo, "rate", lambda self, info: 1 / 0)
    assert not given.outer_step(record, frames).unmoved
    assert ways.asked == 0


@dataclass(frozen=True, slots=True)
class Careful(SparseLoCo):
    """As somebody would write it who knows nothing of ``rate``."""

    name: ClassVar[str] = "careful"
    preset: ClassVar[None] = None

    def outer_step(
        self, anchor: torch.Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return anchor - received["change"].clamp(-0.01, 0.01), {}


def test_an_outer_step_of_ones_own_is_asked_though_an_ancestor_has_a_rate() -> None:
    """It was on those peers only that had no room for what came: a fork."""
    kept, forgetful = (with_method(replica(make_aggregation("mean", {}), SPARSE), Careful()) for _ in range(2))
    forgetful.contents.unpacked.capacity = 0
    record, frames = round_of(kept.codec, [randn(n) for n in range(3)])
    for frame in frames.values():
        kept.contents.payloads(frame)
    one, other = kept.outer_step(record, frames), forgetful.outer_step(record, frames)
    assert one.digest == other.digest
    assert float((one.after_N - one.before_N).abs().max()) <= 0.0101


def test_values_of_the_sample_come_together_from_parts() -> None:
    for numel in (1000, 40_000):
        sample, value = Sample(numel), randn(0).repeat(9)[:numel]
        parts = [sample.of_part(value[start : start + 700], start) for start in range(0, numel, 700)]
        assert torch.equal(torch.cat(parts), sample.of(value))
