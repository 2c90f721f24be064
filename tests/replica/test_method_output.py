"""What a method returns is looked at before any of it is applied."""

from __future__ import annotations

import math

import pytest
import torch

from decentral.replica.method_output import NOBODY, stepped, weighed

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


def test_an_error_of_one_machine_alone_is_no_answer():
    def full() -> list[float]:
        raise MemoryError

    with pytest.raises(MemoryError):
        weighed(full, 1)


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
