"""A method that returns what nobody can use: the run stands as it was, on every peer alike, and says whose fault."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from decentral.observe.health import Notices
from decentral.optimizers.base import Live, Speaking
from decentral.optimizers.diloco import DiLoCo
from decentral.optimizers.pair_averaging import ADPSGD
from decentral.replica.pair_step import GossipStep
from decentral.training.live_side import LiveSide
from decentral.training.schedule import SyncSchedule
from tests.kit.gossip_learners import Learner
from tests.kit.nodes import Lab, tiny_model
from tests.kit.partitions import settle

Bad = Callable[..., Any]


def bad(name: str, returns: Bad) -> DiLoCo:
    """DiLoCo, but for one function."""
    made: type[DiLoCo] = dataclasses.make_dataclass("Bad", [], bases=(DiLoCo,), frozen=True, namespace={name: returns})
    return made(lr=0.5, momentum=0.0)


FAULTS = {
    "negative weights": bad("weights", lambda self, told, given, state: [-1.0] * len(told)),
    "weights that are NaN": bad("weights", lambda self, told, given, state: [math.nan] * len(told)),
    "weights that are infinite": bad("weights", lambda self, told, given, state: [math.inf] * len(told)),
    "too few weights": bad("weights", lambda self, told, given, state: given[1:]),
    "no weights": bad("weights", lambda self, told, given, state: None),
    "an anchor that is NaN": bad("outer_step", lambda self, x, received, state, info: (x * math.nan, dict(state))),
    "an anchor too long": bad("outer_step", lambda self, x, received, state, info: (torch.cat([x, x]), dict(state))),
    "no state": bad("outer_step", lambda self, x, received, state, info: (x - received["change"], {})),
    "tensors that do not fit": bad("outer_step", lambda self, x, received, state, info: (x + x[:-1], dict(state))),
    "what is not there": bad("weights", lambda self, told, given, state: [one.loss for one in told]),
    "an error": bad("outer_step", lambda self, x, received, state, info: (x, {"momentum": state["velocity"]})),
}


@pytest.mark.parametrize("exchange", ["gather", "reduce"])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_method_returns_and_nobody_can_use_moves_nothing_and_ends_no_process(
    run_lab: Any, terms: Any, exchange: str, fault: str
) -> None:
    async def script(lab: Lab) -> None:
        for _ in range(3):
            lab.add(kind=Learner)
        await settle(lab)
        before = lab.members[0].node.replica.anchors[0]
        for member in lab.members:
            member.node.replica.method, member.idle = FAULTS[fault], False
        await lab.rounds(2)
        await settle(lab)
        for member in lab.members:
            assert torch.equal(member.node.replica.anchors[0], before)
            told = [fields for event, fields in member.events if event == "unmoved"]
            assert len(told) >= 2
            assert {one["method"] for one in told} == {"diloco"}
            assert all(one["why"].startswith(("weights", "outer_step")) for one in told)
            member.node.replica.method, member.idle = DiLoCo(lr=0.5, momentum=0.0), False
        await lab.rounds(2)
        lab.check_equal()
        assert not torch.equal(lab.members[0].node.replica.anchors[0], before)

    run_lab(terms("diloco").changed(exchange={"kind": exchange}), script, make_model=tiny_model)


class Chatty(Speaking, DiLoCo):
    """DiLoCo, whose summary no offer can carry."""

    def says(self, live: Live, fragment: int, sent: Sequence[torch.Tensor]) -> bytes:
        return bytes(65)


class Wordy(Learner):
    """Under such a method."""

    def __init__(self, lab: Lab, number: int, founder: bool) -> None:
        super().__init__(lab, number, founder)
        self.node.replica.method = Chatty(lr=0.5, momentum=0.0)
        self.schedule = SyncSchedule(self.interval, 0, self.node.replica.method, bytes(32))


@pytest.mark.parametrize("exchange", ["gather", "reduce"])
def test_a_summary_that_is_too_long_stays_at_home_and_ends_no_process(run_lab: Any, terms: Any, exchange: str) -> None:
    async def script(lab: Lab) -> None:
        for _ in range(2):
            lab.add(kind=Wordy)
        await lab.rounds(3)
        lab.check_equal()
        for member in lab.members:
            told = [fields for event, fields in member.events if event == "unsaid"]
            assert len(told) >= 2
            assert told[-1]["round"] >= told[0]["round"] + 1
            assert told[0]["why"].startswith("summary gave 65 bytes")
            assert "went without a summary: diloco: summary gave 65 bytes" in str(Notices().hear("unsaid", told[0], ""))

    run_lab(terms("diloco").changed(exchange={"kind": exchange}), script, make_model=tiny_model)


class BadPair(ADPSGD):
    """Returns NaN; notes how its steps are booked."""

    def __init__(self) -> None:
        ADPSGD.__init__(self)
        object.__setattr__(self, "booked", [])

    def outer_step(self, anchor: Any, received: Any, state: Any, info: Any) -> Any:
        return anchor * math.nan, {}

    def after_commit(self, *given: Any) -> None:
        self.booked.append("taken")  # type: ignore[attr-defined]

    def progress_lost(self, *given: Any) -> None:
        self.booked.append("lost")  # type: ignore[attr-defined]


class Paired(Learner):
    """Under that method."""

    def __init__(self, lab: Lab, number: int, founder: bool) -> None:
        super().__init__(lab, number, founder)
        self.outcomes: list[GossipStep] = []
        self.node.replica.method = self.method = BadPair()
        live = LiveSide(self.model, self.inner, self.signer.peer, lab.schema)
        self.schedule = SyncSchedule(self.interval, 0, self.method, bytes(32), live=live)

    def swap_ended(self, outcome: GossipStep) -> None:
        self.outcomes.append(outcome)


def test_a_gossip_step_that_nobody_can_use_is_told_as_such_and_what_was_learnt_is_given_up(
    run_lab: Any, terms: Any
) -> None:
    async def script(lab: Lab) -> None:
        members: list[Any] = [lab.add(kind=Paired) for _ in range(2)]
        await lab.until(lambda: all(len(member.outcomes) >= 3 for member in members))
        for member in members:
            assert all(outcome.unmoved for outcome in member.outcomes)
            assert set(member.method.booked) == {"lost"}

    run_lab(terms("ad_psgd"), script, make_model=tiny_model)
