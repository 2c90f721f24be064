"""What an aggregation rule returns is looked at before any of it is added up, and one contributor ends no process."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch

from decentral.optimizers import Aggregation, make_aggregation
from decentral.optimizers.aggregation.base import Needs, Sent
from decentral.optimizers.diloco import DiLoCo
from decentral.replica.replica import Replica
from decentral.replica.weights import Unusable, row_of, scales_of
from tests.laws.learners import EXACT, Learners
from tests.laws.swarm import NUMEL

ALL = (0, 1, 2)
SENT = Sent.of_norms([1.0, 2.0], [1.0, 16.0])
ROWS_KN = torch.ones(3, 4)


@dataclasses.dataclass(frozen=True, slots=True)
class Given(Aggregation):
    """Gives what it is told to."""

    name: ClassVar[str] = "given"
    make: Callable[[], Any]
    asks: Needs = "norms"

    @property
    def needs(self) -> Needs:
        return self.asks

    def scales(self, sent: Sent) -> list[float]:
        made: list[float] = self.make()
        return made

    def weigh(self, sent: Sent) -> list[float]:
        return self.scales(sent)

    def combine(self, row_KN: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.make()
        return made


UNUSABLE: list[tuple[Any, str]] = [
    (None, "no float32 for each of 2"),
    (3.0, "no float32 for each of 2"),
    ([1.0], "no float32 for each of 2"),
    ([1.0, 1.0, 1.0], "no float32 for each of 2"),
    ([1.0, "two"], "no float32 for each of 2"),
    ([1e39, 1.0], "no float32 for each of 2"),
    ([1.0, 3e38], "no float32 for each of 2"),  # times its weight
    ([1.0, math.nan], "NaN or Inf"),
    ([-math.inf, 1.0], "NaN or Inf"),
]


@pytest.mark.parametrize(("made", "words"), UNUSABLE)
def test_scales_that_cannot_be_used_say_why(made: Any, words: str) -> None:
    with pytest.raises(Unusable, match=f"given: weigh gave {words}"):
        scales_of(Given(lambda: made), SENT)


def test_a_rule_that_raises_says_what_and_an_error_of_one_machine_alone_is_no_answer() -> None:
    with pytest.raises(Unusable, match="given: weigh raised ZeroDivisionError: division by zero"):
        scales_of(Given(lambda: 1 / 0), SENT)

    def full() -> list[float]:
        raise MemoryError

    with pytest.raises(MemoryError):
        scales_of(Given(full), SENT)


def test_sound_scales_are_taken_to_the_last_bit() -> None:
    assert scales_of(Given(lambda: [0.1, -2.0]), SENT) == [0.1, -2.0]


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (None, "combine gave nothing"),
        ([1.0] * 4, "gave list, want float32"),
        (torch.ones(3), r"gave torch.float32 \(3,\), want float32 \(4,\)"),
        (torch.ones(4, dtype=torch.float64), "gave torch.float64"),
        (torch.full((4,), math.nan), "NaN or Inf"),
    ],
)
def test_a_row_that_cannot_be_used_says_why(made: Any, words: str) -> None:
    with pytest.raises(Unusable, match=words):
        row_of(Given(lambda: made, "rows"), ROWS_KN)


def randn(seed: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def after(rule: Aggregation, steps: Sequence[torch.Tensor]) -> list[Replica]:
    run = Learners(DiLoCo(lr=1.0, momentum=0.0), 3, torch.zeros(NUMEL), EXACT, rule)
    run.learn(dict(enumerate(steps)))
    run.meet(ALL)
    return [peer.replica for peer in run.peers]


@pytest.mark.parametrize("asks", ["norms", "products", "rows"])
def test_a_round_under_a_rule_that_fails_moves_nothing_on_every_peer_and_names_the_rule(asks: Needs) -> None:
    rule = Given(lambda: 1 / 0, asks)
    run = Learners(DiLoCo(lr=1.0, momentum=0.0), 3, randn(0), EXACT, rule)
    run.learn({n: randn(n) for n in ALL})
    offered = run.offer(ALL)
    for peer in run.peers:
        step = peer.replica.outer_step(offered.record, offered.frames)
        assert step.after_N is peer.anchor_N
        asked = "combine" if asks == "rows" else "weigh"
        assert step.unmoved == f"given: {asked} raised ZeroDivisionError: division by zero"


@pytest.mark.parametrize("tiny", [1e-45, 1e-40, 1e-30, 0.0])
def test_under_flag_a_contributor_of_hardly_any_length_leaves_the_others_what_they_are(tiny: float) -> None:
    """One of 1e-40 was scaled beyond float32, which ended every process of the run."""
    steps = [randn(0), randn(0) + 0.1 * randn(1), torch.full((NUMEL,), tiny)]
    replicas = after(make_aggregation("flag", {}), steps)
    assert len({replica.digest for replica in replicas}) == 1
    assert 0.5 < float(replicas[0].anchors[0].norm() / steps[0].norm()) < 0.8, "two of three sent that"
