"""How a peer looks at its live model around commits, and what it leaves as it was."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from decentral.errors import ConfigError
from decentral.observe.diagnostics import Look
from decentral.training.live_model import LiveModel
from decentral.training.reporting import AT_FIRST, MOST, SHARE, LoggedLooks, Looks

ROUND = 1.0  # s of a round without looks


class Evaluated:
    """A peer whose evaluation takes so many seconds of a clock of its own."""

    def __init__(self, seconds: float = 0.0, evaluate: Callable[[], object] | None = None) -> None:
        self.now, self.seconds, self.calls, self.found = 0.0, seconds, 0, list[Look]()
        self.model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
        self._evaluate = evaluate or (lambda: 1.0)
        self.failed = 0
        self.looks = Looks(
            self._timed, LiveModel(self.model, 1, None), self.found.append, lambda: self.now, self._fails
        )
        self.looks.begin()

    def _fails(self) -> None:
        self.failed += 1

    def _timed(self) -> object:
        self.now += self.seconds
        self.calls += 1
        return self._evaluate()

    def rounds(self, count: int) -> None:
        for step in range(1, count + 1):
            self.now += ROUND
            self.looks.before()
            self.looks.after(step)


def test_a_look_has_the_losses_where_the_steps_began_where_they_ended_and_after_the_commit() -> None:
    losses = iter([5.0, 4.0, 4.5, 3.5, 3.0])
    peer = Evaluated(evaluate=lambda: next(losses))
    peer.rounds(2)
    assert peer.found == [Look(1, 5.0, 4.0, 4.5), Look(2, 4.5, 3.5, 3.0)]


@pytest.mark.parametrize("seconds", [0.2, 5.0])
def test_a_slow_evaluation_is_made_as_seldom_as_its_share_of_the_time_allows(seconds: float) -> None:
    peer = Evaluated(seconds)
    peer.rounds(3000)
    assert len(peer.found) > AT_FIRST
    spent, free = peer.calls * seconds, (2 * AT_FIRST + 1) * seconds
    assert spent <= SHARE * peer.now + free
    assert spent > 0.8 * SHARE * peer.now, "it is paid for, so it is made"


def test_a_fast_one_is_made_in_every_round() -> None:
    peer = Evaluated(0.001)
    peer.rounds(50)
    assert [one.outer_step for one in peer.found] == list(range(1, 51))


def test_modes_buffers_gradients_and_random_generators_are_as_before() -> None:
    """A user's function often puts the model into evaluation and back into training, and draws a batch."""

    def evaluate() -> torch.Tensor:
        assert not model.training
        assert not torch.is_grad_enabled()
        model.train()
        random.random()
        np.random.rand()
        return model(torch.randn(4, 2)).square().mean()

    peer = Evaluated()
    peer._evaluate, model = evaluate, peer.model
    model[0].eval()  # as who freezes a layer has it
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    buffers = [one.clone() for one in model.buffers()]
    peer.rounds(2)
    assert len(peer.found) == 2
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()
    assert all(torch.equal(was, one) for was, one in zip(buffers, model.buffers(), strict=True))
    assert [one.training for one in model] == [False, True, True]
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("evaluate", "why"),
    [
        (lambda: 1 / 0, r"raised ZeroDivisionError: division by zero; it takes no argument"),
        (lambda: torch.ones(3), r"a Tensor of shape \(3,\) is not one number"),
        (lambda: None, "a NoneType is not one number"),
    ],
)
def test_what_cannot_be_evaluated_is_said_before_anything_is_trained(evaluate, why) -> None:
    with pytest.raises(ConfigError, match=why):
        Evaluated(evaluate=evaluate)


def test_an_error_later_is_said_once_and_ends_no_run(caplog: pytest.LogCaptureFixture) -> None:
    losses = iter([5.0, 4.0, 4.5])
    peer = Evaluated(evaluate=lambda: next(losses))
    with caplog.at_level(logging.WARNING, "decentral"):
        peer.rounds(50)
    assert len(peer.found) == 1
    (said,) = caplog.messages
    assert "join(evaluate=...) raised StopIteration" in said
    assert peer.failed == 1
    assert peer.calls == 4


def test_a_loss_that_is_no_number_is_no_look() -> None:
    losses = iter([5.0, float("nan"), 4.5, 4.0, 3.9, 3.8, 3.7])
    peer = Evaluated(evaluate=lambda: next(losses))
    peer.rounds(3)
    assert peer.found == [Look(2, 4.5, 4.0, 3.9), Look(3, 3.9, 3.8, 3.7)]


@pytest.mark.parametrize("loss", [float("inf"), float("nan")])
def test_evaluations_that_come_to_no_look_are_paid_for_and_told_once(
    loss: float, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "decentral"):
        peer = Evaluated(1.0, lambda: loss)
        peer.rounds(1000)
    assert caplog.messages == [
        f"join(evaluate=...) gave {loss}, which is passed over; look at the data that it evaluates"
    ]
    assert peer.found == []
    assert peer.calls <= SHARE * peer.now + 2 * AT_FIRST + 1


def test_a_peer_that_is_taken_in_every_second_commit_pays_as_well() -> None:
    peer = Evaluated(1.0)
    for _ in range(500):
        peer.rounds(1)
        peer.now += ROUND
        peer.looks.give_up()
    assert peer.calls <= SHARE * peer.now + 2 * AT_FIRST + 1


def test_a_buffer_that_the_module_replaces_comes_back() -> None:
    peer = Evaluated()

    def evaluate() -> float:
        peer.model[1].running_mean = peer.model[1].running_mean + 1.0
        return 1.0

    peer._evaluate, was = evaluate, peer.model[1].running_mean
    peer.rounds(2)
    assert peer.model[1].running_mean is was
    assert torch.equal(was, torch.zeros(2))


def test_a_move_that_took_nothing_of_this_peers_is_in_no_look() -> None:
    peer = Evaluated()
    peer.looks.give_up()
    peer.rounds(3)
    assert [one.outer_step for one in peer.found] == [2, 3]


def test_ctrl_c_in_an_evaluation_gets_through() -> None:
    def interrupted() -> float:
        raise KeyboardInterrupt

    peer = Evaluated()
    peer._evaluate = interrupted
    with pytest.raises(KeyboardInterrupt):
        peer.looks.before()


# ---- losses that the loop logs ----


def logged(rounds: list[list[float]]) -> list[Look]:
    found = list[Look]()
    looks = LoggedLooks(found.append)
    for step, losses in enumerate(rounds, 1):
        for loss in losses:
            looks.heard(loss)
        looks.before()
        looks.after(step)
    return found


def test_logged_losses_are_looks_by_the_first_and_the_last_quarter_of_a_round() -> None:
    """The first of a round is of the model before the commit in a loop that logs after its step, and left out."""
    rounds = [[9.0, 5.0, 4.8, 4.0, 4.0, 4.0, 4.0, 3.2, 3.0], [9.0, 3.5, 3.3, 3.0, 3.0, 3.0, 3.0, 2.0, 2.2]]
    (look,) = logged(rounds)
    assert (look.outer_step, look.start, look.before, look.after) == (1, *map(pytest.approx, (4.9, 3.1, 3.4)))


def test_losses_that_are_logged_through_a_pause_are_not_kept() -> None:
    looks = LoggedLooks(lambda look: None)
    for _ in range(3 * MOST):
        looks.heard(1.0)
    assert len(looks._losses) <= MOST


def test_too_few_logged_losses_and_those_that_are_no_number_are_no_look() -> None:
    assert logged([[1.0] * 3] * 20) == []
    assert logged([[float("nan")] * 9] * 20) == []
