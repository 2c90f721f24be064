"""Three peers that really train, one of them at a learning rate of 0.5: it is named, and a clipped run bears it."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from decentral.flow.waiting import inline
from decentral.observe.contributions import RoundMetrics, outliers
from decentral.wire.keys import peer_name
from tests.kit.gossip_learners import Learner
from tests.kit.nodes import Lab, run_in_lab, small_terms

WIDE = 128  # so that each of three owns a part of a reduce: they are cut at multiples of 4096
GOAL = 0.2 * torch.randn(WIDE, WIDE, generator=torch.Generator().manual_seed(3))


def samples(generator: torch.Generator, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(count, WIDE, generator=generator)
    return inputs, inputs @ GOAL.T + torch.randn(count, WIDE, generator=generator)


class Student(Learner):
    """Least squares with AdamW, on data of its own."""

    rate = 0.01

    def __init__(self, lab: Lab, number: int, founder: bool) -> None:
        super().__init__(lab, number, founder)
        self.node.driver.state.observers = (RoundMetrics(self.node.replica, self._on_event, offload=inline),)
        self.parameters = self.model.trained
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=self.rate, weight_decay=0.0)

    def step(self) -> None:
        inputs, wanted = samples(self.generator, 32)
        loss = (torch.nn.functional.linear(inputs, *self.parameters.values()) - wanted).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.stepped()

    def loss(self) -> float:
        """Of the anchor; 1 is what the noise leaves."""
        inputs, wanted = samples(torch.Generator().manual_seed(99), 2000)
        weight_N = self.node.replica.anchors[0]
        weight, bias = weight_N[: WIDE * WIDE].view(WIDE, WIDE), weight_N[WIDE * WIDE :]
        return float((torch.nn.functional.linear(inputs, weight, bias) - wanted).square().mean())


class Wrong(Student):
    rate = 0.5


def model() -> torch.nn.Module:
    layer = torch.nn.Linear(WIDE, WIDE)
    for parameter in layer.parameters():
        torch.nn.init.zeros_(parameter)
    return layer


def run(preset: str, kinds: list[type[Student]], clip: str | None, rounds: int = 30) -> list[Student]:
    seen: list[Student] = []

    async def script(lab: Lab) -> None:
        await lab.start(kinds, rounds)
        lab.check_equal()
        seen.extend(lab.members)

    dense = {"chain": "none", "feedback": "none"}
    run_in_lab(small_terms(preset).changed(outer={"norm_clip": clip}, compressor=dense), script, make_model=model)
    return seen


@pytest.mark.parametrize("preset", ["sparseloco", "diloco"])
@pytest.mark.long
def test_a_wrong_learning_rate_is_named_by_every_peer_and_clipped_costs_less_than_a_tenth(preset):
    clean = run(preset, [Student, Student, Student], None)[0]
    clipped = run(preset, [Student, Student, Wrong], "median")
    ruined = run(preset, [Student, Student, Wrong], None)[0]
    assert not clean.happened("outlier")
    for student in clipped:
        told = student.happened("outlier")
        assert {event["peer"] for event in told} == {peer_name(clipped[2].signer.peer)}
        assert told[0]["times"] > 4
        rounds = [event["round"] for event in told]
        assert all(later - earlier >= 20 for earlier, later in pairwise(rounds))
    assert clipped[0].loss() < 1.1 * clean.loss()
    assert ruined.loss() > 1.5 * clean.loss()


class Twin(Student):
    """Draws what every other one of its kind draws."""

    def __init__(self, lab: Lab, number: int, founder: bool) -> None:
        super().__init__(lab, number, founder)
        self.generator = torch.Generator().manual_seed(7)


@pytest.mark.parametrize(
    ("preset", "event", "kinds"),
    [
        ("sparseloco", "outlier", [Student, Student, Wrong]),
        ("diloco", "twins", [Student, Twin, Twin]),
        pytest.param("diloco", "outlier", [Student, Student, Wrong], marks=pytest.mark.long),
        pytest.param("sparseloco", "twins", [Student, Twin, Twin], marks=pytest.mark.long),
    ],
)
def test_a_wrong_learning_rate_and_two_with_the_same_data_order_are_named_by_every_peer(preset, event, kinds):
    students = run(preset, kinds, None, rounds=10)
    names = {peer_name(student.signer.peer) for student in students if type(student) is not Student}
    for student in students:
        told = student.happened(event)
        assert [set(one.get("peers", [one.get("peer")])) for one in told] == [names] * len(told)
        assert told[0].get("times", 5.0) > 4
        assert told[0].get("cosine", 1.0) > 0.99


@pytest.mark.parametrize("claimed", [16, 2**32 - 1])
def test_who_claims_any_number_of_steps_is_named_for_an_update_that_is_too_long_for_four_times_the_usual(claimed):
    assert outliers([1.0, 1.0, 9.0, 1.0], [4, 4, claimed, 4]) == [2]
    assert outliers([1.0, 1.0, 7.0, 1.0], [4, 4, claimed, 4]) == [], "an absent peer brings several rounds' steps"
