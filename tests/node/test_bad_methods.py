"""A method or a rule that gives what nobody can use: the run stands as it was on every peer, and says whose fault.

tests/replica/test_weights.py has each value that is refused; here it reaches rounds, and ends no process.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch

from decentral.observe.health import Notices
from decentral.optimizers import Aggregation
from decentral.optimizers.aggregation.base import Needs, Sent
from decentral.optimizers.base import Live, Speaking
from decentral.optimizers.diloco import DiLoCo
from decentral.optimizers.pair_averaging import ADPSGD
from decentral.replica.pair_step import GossipStep
from decentral.training.live_side import LiveSide
from decentral.training.schedule import SyncSchedule
from tests.kit.gossip_learners import Learner
from tests.kit.nodes import Lab, scene, small_terms, tiny_model
from tests.kit.partitions import settle


def bad(name: str, returns: Callable[..., Any]) -> DiLoCo:
    """DiLoCo, but for one function."""
    made: type[DiLoCo] = dataclasses.make_dataclass("Bad", [], bases=(DiLoCo,), frozen=True, namespace={name: returns})
    return made(lr=0.5, momentum=0.0)


METHODS = {
    "negative weights": bad("weights", lambda self, told, given, state: [-1.0] * len(told)),
    "too few weights": bad("weights", lambda self, told, given, state: given[1:]),
    "what is not there": bad("weights", lambda self, told, given, state: [one.loss for one in told]),
    "an anchor that is NaN": bad("outer_step", lambda self, x, received, state, info: (x * math.nan, dict(state))),
    "an anchor too long": bad("outer_step", lambda self, x, received, state, info: (torch.cat([x, x]), dict(state))),
    "no state": bad("outer_step", lambda self, x, received, state, info: (x - received["change"], {})),
    "tensors that do not fit": bad("outer_step", lambda self, x, received, state, info: (x + x[:-1], dict(state))),
    "an error": bad("outer_step", lambda self, x, received, state, info: (x, {"momentum": state["velocity"]})),
}
RULES: dict[str, tuple[Callable[[Sent], Any], str]] = {  # by fault: what it weighs, and what is told
    "raises": (
        lambda sent: [1 / (one - one) for one in sent.norm_K.tolist()],
        "bad: weigh raised ZeroDivisionError",
    ),
    "shapes": (lambda sent: torch.ones(2) + torch.ones(3), "bad: weigh raised RuntimeError: The size of tensor"),
    "NaN": (lambda sent: [math.nan] * len(sent), "bad: weigh gave NaN or Inf"),
    "too few": (lambda sent: [1.0], "bad: weigh gave no float32 for each of 3"),
    "a sum": (lambda sent: [3e38] * len(sent), "the mean of the contributions is beyond float32"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class BadRule(Aggregation):
    """Looks at norms, and is wrong."""

    name: ClassVar[str] = "bad"
    fault: Callable[[Sent], Any]

    @property
    def needs(self) -> Needs:
        return "norms"

    def weigh(self, sent: Sent) -> list[float]:
        return list(self.fault(sent))


def with_rule(member: Learner, rule: Aggregation) -> None:
    member.node.replica.rule = rule


PRODUCT = tuple(itertools.product((*METHODS, *RULES), ("gather", "reduce")))
IN_TURNS = [pytest.param(*one, marks=[] if n % 4 in (0, 3) else [pytest.mark.long]) for n, one in enumerate(PRODUCT)]


@pytest.mark.parametrize(("fault", "exchange"), IN_TURNS)  # of every fault one exchange, and the other is long
@scene(
    lambda exchange: small_terms("diloco").changed(exchange={"kind": exchange}),
    peers=[Learner] * 3,
    make_model=tiny_model,
)
async def test_what_is_given_and_nobody_can_use_moves_nothing_and_ends_no_process(
    lab: Lab, fault: str, exchange: str
) -> None:
    await settle(lab)
    before, sound = lab.members[0].node.replica.anchors[0], lab.members[0].node.replica.rule
    for member in lab.members:
        member.node.replica.method = METHODS.get(fault, DiLoCo(lr=0.5, momentum=0.0))
        if fault in RULES:
            with_rule(member, BadRule(RULES[fault][0]))
        member.idle = False
    await lab.rounds(2)
    await settle(lab)
    told = [fields for member in lab.members for fields in member.happened("unmoved")]
    if fault in RULES:  # those of a reduce that owned nothing saw no norms
        assert len(told) >= 2
        assert all(RULES[fault][1] in str(one["why"]) for one in told)
    else:
        assert all(len(member.happened("unmoved")) >= 2 for member in lab.members)
        assert {one["method"] for one in told} == {"diloco"}
        assert all(one["why"].startswith(("weights", "outer_step")) for one in told)
    for member in lab.members:
        assert torch.equal(member.node.replica.anchors[0], before)
        member.node.replica.method, member.idle = DiLoCo(lr=0.5, momentum=0.0), False
        with_rule(member, sound)
    await lab.rounds(2)
    lab.check_equal()
    assert not torch.equal(lab.members[0].node.replica.anchors[0], before)


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
@scene(
    lambda exchange: small_terms("diloco").changed(exchange={"kind": exchange}),
    peers=[Wordy] * 2,
    rounds=3,
    make_model=tiny_model,
)
async def test_a_summary_that_is_too_long_stays_at_home_and_ends_no_process(lab: Lab, exchange: str) -> None:
    lab.check_equal()
    for member in lab.members:
        told = member.happened("unsaid")
        assert len(told) >= 2
        assert told[-1]["round"] >= told[0]["round"] + 1
        assert told[0]["why"].startswith("summary gave 65 bytes")
        assert "went without a summary: diloco: summary gave 65 bytes" in str(Notices().hear("unsaid", told[0], ""))


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


@scene("ad_psgd", peers=[Paired] * 2, make_model=tiny_model)
async def test_a_gossip_step_that_nobody_can_use_is_told_as_such_and_what_was_learnt_is_given_up(lab: Lab) -> None:
    members: list[Any] = lab.members
    await lab.until(lambda: all(len(member.outcomes) >= 3 for member in members))
    for member in members:
        assert all(outcome.unmoved for outcome in member.outcomes)
        assert set(member.method.booked) == {"lost"}
