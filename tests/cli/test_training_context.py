"""tests/cli/test_training_context.py"""

import math
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from decentral.cli.training_context import AnchorJudge, RecentLoss, Stopwatch
from decentral.parameters import schema_of
from decentral.tasks.evaluate import words_before


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_waiting_for_a_round_inside_the_step_is_not_counted_as_training() -> None:
    clock = Clock()
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    watch = Stopwatch(optimizer, clock)

    def wait_for_a_round(*_: object) -> None:
        clock.now += 6.0

    optimizer.register_step_post_hook(wait_for_a_round)  # as the swarm does, after the watch
    clock.now = 100.0  # nobody else was there yet
    assert watch.seconds == 0.0
    for _ in range(2):
        watch.step_begins()
        clock.now += 2.0
        parameter.grad = torch.ones(1)
        optimizer.step()
    assert watch.busy == pytest.approx(4.0)
    assert watch.seconds == pytest.approx(16.0)
    assert watch.utilisation == pytest.approx(0.25)


class Shout(nn.Module):
    """Predicts byte 0 with a logit of ``weight``, whatever it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        logits = torch.zeros(*input_ids.shape, 256)
        logits[..., 0] = self.weight
        return SimpleNamespace(logits=logits)


def judge(clock: Callable[[], float] = time.perf_counter) -> AnchorJudge:
    model = Shout()
    return AnchorJudge(model, schema_of(model), torch.zeros(64, dtype=torch.uint8), context=8, clock=clock)


def test_an_anchor_is_judged_by_its_own_values() -> None:
    assert judge().bits_per_byte([torch.zeros(1)]) == pytest.approx(8.0)
    expected = math.log2(255 + math.e**9) - 9 * math.log2(math.e)
    assert judge().bits_per_byte([torch.tensor([9.0])]) == pytest.approx(expected, abs=1e-5)


def test_judging_may_take_a_twentieth_of_the_time() -> None:
    some = judge()
    assert some.affordable(0.0)
    some.bits_per_byte([torch.zeros(1)])
    assert not some.affordable(0.0)
    assert some.affordable(1e6)


def test_what_a_model_says_is_one_line_of_harmless_signs_and_touches_no_generator() -> None:
    some, before = judge(), torch.get_rng_state()
    anchor = [torch.tensor([0.0])]  # every byte is as likely, escapes and halves of letters too
    first, second = some.sample(anchor, 1e6), some.sample(anchor, 1e6)
    assert first == second, "the same model says the same"
    assert first["prompt"] == "The"
    assert str(first["text"]).startswith("The ")
    assert str(first["text"]).isprintable()
    assert torch.equal(torch.get_rng_state(), before)
    assert some._model.training


def test_saying_something_may_take_a_hundredth_of_the_time_and_breaks_off() -> None:
    now = iter(range(10_000))
    some, anchor = judge(lambda: float(next(now))), [torch.zeros(1)]  # every token takes a second, as does putting it
    assert some.sample(anchor, 1_000.0) == {}, "it broke off after 11 of the 10 that it had"
    assert some._spent_on_samples == 11.0
    assert some.sample(anchor, 7_500.0) == {}
    assert some._spent_on_samples == 11.0, "65 and 11 are more than 75: it was not begun"
    assert some.sample(anchor, 7_600.0) != {}


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_a_model_whose_numbers_are_none_says_nothing_and_ends_no_training(weight: float) -> None:
    some = judge()
    assert some.sample([torch.tensor([weight])], 1e6) == {}
    assert some._model.training
    assert some.sample([torch.zeros(1)], 1e6) != {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cut\n  first words of a line that is long", "first words of a "),
        ("cut\nshort\n" + 30 * "x", 20 * "x"),
        ("cut\n" + 12 * "日本", 10 * "日本"),
        ("no line at all", "The "),
        ("", "The "),
    ],
)
def test_a_model_goes_on_from_the_first_words_of_a_line(text: str, words: str) -> None:
    assert words_before(torch.tensor(list(text.encode()), dtype=torch.uint8)) == words


def test_the_loss_that_is_shown_is_the_mean_of_a_round() -> None:
    recent = RecentLoss(3)
    for loss in (9.0, 1.0, 2.0, 6.0):
        recent.add(torch.tensor(loss))
    assert recent.mean.item() == 3.0
