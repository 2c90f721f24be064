"""What a method returns is looked at before any of it is applied."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch

from decentral.optimizers import Aggregation, make_aggregation
from decentral.optimizers.aggregation.base import Needs, Sent
from decentral.optimizers.diloco import DiLoCo
from decentral.replica.apply import outer_step
from decentral.replica.replica import Replica
from decentral.replica.weights import NOBODY, Unusable, make_step, make_summary, make_weights, row_of, scales_of
from tests.kit.learners import EXACT, Learners
from tests.kit.replicas import NUMEL

ANCHOR, STATE = torch.ones(3), {"momentum": torch.zeros(3)}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: [1.0, -0.5], "numbers below 0"),
        (lambda: [1.0, math.nan], "NaN or Inf"),
        (lambda: [1.0, math.inf], "NaN or Inf"),
        (lambda: [1.0], "1 numbers for 2 contributors"),
        (lambda: [1.0, 1.0, 1.0], "3 numbers for 2 contributors"),
        (lambda: [], "0 numbers for 2 contributors"),
        (lambda: [1.0, 1e39], "no float32 numbers"),
        (lambda: [3e38, 3e38], "no float32 numbers"),  # their sum, which the mean is divided by
        (lambda: [1.0, "two"], "no float32 numbers"),
        (lambda: [1.0, None], "no float32 numbers"),
        (lambda: None, "no float32 numbers"),
        (lambda: 3.0, "no float32 numbers"),
        (lambda: [1 / 0], "weights raised ZeroDivisionError: division by zero"),
        (lambda: [0.0, -0.0], NOBODY),
        (lambda: [0.0, 1e-60], NOBODY),
    ],
)
def test_weights_that_cannot_be_used_count_nobody_and_say_why(make, words):
    weights, why = make_weights(make, 2)
    assert weights == [0.0, 0.0]
    assert words in why


def test_weights_are_float32():
    assert make_weights(lambda: [0.1, 0.0], 2) == ([0.10000000149011612, 0.0], "")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        OSError(28, "No space left on device"),
        ImportError("no such package here"),
        RuntimeError("can't start new thread"),
    ],
)
def test_an_error_of_one_machine_alone_is_no_answer(error):
    def fails() -> list[float]:
        raise error

    with pytest.raises(type(error)):
        make_weights(fails, 1)
    with pytest.raises(type(error)):
        make_weights(lambda: (fails()[0] for _ in range(1)), 1)  # a generator, which fails when it is read


def test_more_than_the_machine_has_is_no_answer_where_torch_has_no_class_for_it():
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        make_step(lambda: (torch.empty(10**15), {}), ANCHOR, STATE)


@pytest.mark.parametrize(
    ("make", "summary", "words"),
    [
        (lambda: bytes(64), bytes(64), ""),
        (lambda: bytes(65), b"", "summary gave 65 bytes, 64 at most"),
        (lambda: "text", b"", "summary gave str, want bytes"),
        (lambda: None, b"", "summary gave NoneType, want bytes"),
        (lambda: bytes([256]), b"", "summary raised ValueError: bytes must be in range(0, 256)"),
    ],
)
def test_a_summary_is_passed_on_as_it_is_and_one_that_no_offer_can_carry_is_none_and_says_why(make, summary, words):
    found, why = make_summary(make)
    assert found == summary
    assert words in why
    assert bool(why) == bool(words)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: (ANCHOR * math.nan, STATE), "NaN or Inf for the anchor"),
        (lambda: (ANCHOR * math.inf, STATE), "NaN or Inf for the anchor"),
        (lambda: (torch.ones(4), STATE), "torch.float32 (4,) on cpu for the anchor, want torch.float32 (3,)"),
        (lambda: (torch.ones(3, dtype=torch.float64), STATE), "torch.float64 (3,)"),
        (lambda: (None, STATE), "NoneType for the anchor"),
        (lambda: (ANCHOR, {"momentum": torch.full((3,), math.inf)}), "NaN or Inf for momentum"),
        (lambda: (ANCHOR, {"momentum": torch.zeros(1)}), "(1,) on cpu for momentum"),
        (lambda: (ANCHOR, {}), "the state [], want ['momentum']"),
        (lambda: (ANCHOR, STATE | {"more": ANCHOR}), "the state ['momentum', 'more'], want ['momentum']"),
        (lambda: ANCHOR, "no pair of anchor and state"),
        (lambda: (ANCHOR, None), "no pair of anchor and state"),
        (lambda: ANCHOR + torch.ones(4), "outer_step raised RuntimeError: The size of tensor a"),
        (lambda: ANCHOR.velocity, "outer_step raised AttributeError: 'Tensor' object has no attribute 'velocity'"),
        (lambda: int("x", 99), "outer_step raised ValueError"),
        (lambda: next(iter(())), "outer_step raised StopIteration"),
        (lambda: ({}["summary"], {}), "outer_step raised KeyError: 'summary'"),
    ],
)
def test_a_step_that_raises_or_cannot_be_used_says_why_on_every_peer(make, words):
    with pytest.raises(Unusable, match=re.escape(words)):
        make_step(make, ANCHOR, STATE)


def test_a_sound_step_is_taken_as_it_is():
    after, state = ANCHOR + 1, {"momentum": ANCHOR}
    after_N, after_state = make_step(lambda: (after, state), ANCHOR, STATE)
    assert after_N is after
    assert after_state == state


# ---- test rule output ----
#
# What an aggregation rule returns is looked at before any of it is added up, and one contributor ends no process.

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
        step = outer_step(peer.replica, offered.record, offered.frames)
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
