"""What a method returns is looked at before any of it is applied."""

from __future__ import annotations

import math

import pytest
import torch

from decentral.replica.weights import NOBODY, said, stepped, weighed

ANCHOR, STATE = torch.ones(3), {"momentum": torch.zeros(3)}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([1.0, -0.5], "numbers below 0"),
        ([1.0, math.nan], "NaN or Inf"),
        ([1.0, math.inf], "NaN or Inf"),
        ([1.0], "1 numbers for 2 contributors"),
        ([1.0, 1.0, 1.0], "3 numbers for 2 contributors"),
        ([], "0 numbers for 2 contributors"),
        ([1.0, 1e39], "no float32 numbers"),
        ([3e38, 3e38], "no float32 numbers"),  # their sum, which the mean is divided by
        ([1.0, "two"], "no float32 numbers"),
        ([1.0, None], "no float32 numbers"),
        (None, "no float32 numbers"),
        (3.0, "no float32 numbers"),
    ],
)
def test_weights_that_cannot_be_used_count_nobody_and_say_why(given, words):
    found = weighed(lambda: given, 2)
    assert found.weights == [0.0, 0.0]
    assert words in found.why


def test_weights_that_raise_count_nobody_and_say_why():
    found = weighed(lambda: [1 / 0], 1)
    assert (found.weights, found.why) == ([0.0], "weights raised ZeroDivisionError: division by zero")


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
        weighed(fails, 1)
    with pytest.raises(type(error)):
        weighed(lambda: (fails()[0] for _ in range(1)), 1)  # a generator, which fails when it is read


def test_more_than_the_machine_has_is_no_answer_where_torch_has_no_class_for_it():
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        stepped(lambda: (torch.empty(10**15), {}), ANCHOR, STATE)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ANCHOR + torch.ones(4), "outer_step raised RuntimeError: The size of tensor a"),
        (lambda: ANCHOR.velocity, "outer_step raised AttributeError: 'Tensor' object has no attribute 'velocity'"),
        (lambda: int("x", 99), "outer_step raised ValueError"),
        (lambda: next(iter(())), "outer_step raised StopIteration"),
    ],
)
def test_whatever_a_step_raises_of_its_numbers_comes_on_every_peer_and_moves_nothing(make, words):
    found = stepped(make, ANCHOR, STATE)
    assert found.after_N is ANCHOR
    assert words in found.why


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (bytes(65), "summary gave 65 bytes, 64 at most"),
        ("text", "summary gave str, want bytes"),
        (None, "summary gave NoneType, want bytes"),
    ],
)
def test_a_summary_that_no_offer_can_carry_is_none_and_says_why(made, words):
    found, why = said(lambda: made)
    assert found == b""
    assert words in why


def test_a_summary_is_passed_on_as_it_is_and_one_that_raises_is_none():
    assert said(lambda: bytes(64)) == (bytes(64), "")
    assert said(lambda: bytes([256])) == (b"", "summary raised ValueError: bytes must be in range(0, 256)")


def test_weights_are_float32_and_nobody_counts_when_all_are_zero():
    assert weighed(lambda: [0.1, 0.0], 2).weights == [0.10000000149011612, 0.0]
    assert weighed(lambda: [0.0, -0.0, 1e-60], 3).why == NOBODY


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ((ANCHOR * math.nan, STATE), "NaN or Inf for the anchor"),
        ((ANCHOR * math.inf, STATE), "NaN or Inf for the anchor"),
        ((torch.ones(4), STATE), "torch.float32 (4,) on cpu for the anchor, want torch.float32 (3,)"),
        ((torch.ones(3, dtype=torch.float64), STATE), "torch.float64 (3,)"),
        ((None, STATE), "NoneType for the anchor"),
        ((ANCHOR, {"momentum": torch.full((3,), math.inf)}), "NaN or Inf for momentum"),
        ((ANCHOR, {"momentum": torch.zeros(1)}), "(1,) on cpu for momentum"),
        ((ANCHOR, {}), "the state [], want ['momentum']"),
        ((ANCHOR, STATE | {"more": ANCHOR}), "the state ['momentum', 'more'], want ['momentum']"),
        (ANCHOR, "no pair of anchor and state"),
        ((ANCHOR, None), "no pair of anchor and state"),
    ],
)
def test_a_step_that_cannot_be_used_is_what_was_before_and_says_why(made, words):
    found = stepped(lambda: made, ANCHOR, STATE)
    assert found.after_N is ANCHOR
    assert found.state == STATE
    assert words in found.why


def test_a_step_that_raises_is_what_was_before_and_says_why():
    found = stepped(lambda: ({}["summary"], {}), ANCHOR, STATE)
    assert found.after_N is ANCHOR
    assert found.why == "outer_step raised KeyError: 'summary'"


def test_a_sound_step_is_taken_as_it_is():
    after, state = ANCHOR + 1, {"momentum": ANCHOR}
    found = stepped(lambda: (after, state), ANCHOR, STATE)
    assert found.after_N is after
    assert (found.state, found.why) == (state, "")
