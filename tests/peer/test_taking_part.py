"""Real nodes of which one takes no part, and what each says of itself: what a round waits for, who was left out and by
whom, who is behind.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from decentral.consensus import learner
from decentral.consensus.chain import VOTING
from decentral.flow.waiting import inline
from decentral.manifest import Manifest
from decentral.observe.diagnostics import Diagnostics
from decentral.observe.health import Notices, health_sentence, is_well
from decentral.observe.status import Status
from decentral.peer.given import Giving
from decentral.peer.saved import WriteBudget
from decentral.peer.status import StallWatch, status_of
from decentral.rounds.local_state import CommittedUpdate
from decentral.training.outer_loop import LoopControl
from decentral.training.reporting import Reporter
from decentral.wire.keys import PeerId, peer_name
from decentral.wire.messages import FrameRef, Message, Promise, Proposal, Vote
from tests.kit.liars import commit_of, record_after
from tests.kit.nodes import Lab, Member, tiny_model

RunLab = Callable[..., None]
Terms = Callable[..., Manifest]


class Seen(Member):
    """A member with the counters and the watch of a peer, so that it has a status."""

    def __init__(self, lab: Lab, number: int, founder: bool) -> None:
        super().__init__(lab, number, founder)
        self.reporter = Reporter(lambda kind, fields: None, self.signer.peer, anyio.current_time)
        self.stalls = StallWatch(self._on_event)

    def _on_update(self, update: CommittedUpdate) -> None:
        super()._on_update(update)
        if update.record is not None:
            self.reporter.round_ended(update)

    def status(self) -> Status:
        """As the peer would write it now."""
        swarm = SimpleNamespace(node=self.node, transport=self.transport)
        part: Any = SimpleNamespace(swarm=swarm, reporter=self.reporter, invite_to_write="", sharing=None)
        part.links = SimpleNamespace(caps=SimpleNamespace(up=None, down=None))
        part.diagnostics = Diagnostics(lambda event, fields: None)
        part.network = SimpleNamespace(kind="", relays=(), watch=SimpleNamespace(silent=()))
        part.network.is_private = False
        part.settings = SimpleNamespace(options={"name": None}, out=Path())
        part.giving, part.writes = Giving(self.reporter.counters, 0, lambda: 0), WriteBudget(None, lambda: 0)
        part.announce = SimpleNamespace(notices=Notices())
        return status_of(part, self.stalls, LoopControl(), inner_steps=0, done=False)

    def says(self) -> str:
        """The sentence of its health."""
        return health_sentence(self.status())

    @property
    def name(self) -> str:
        """As sentences have it."""
        return short(self.signer.peer)

    def told(self, event: str) -> list[dict[str, Any]]:
        """Its events of that name."""
        return [fields for name, fields in self.events if name == event]


def short(peer: PeerId) -> str:
    return "…" + peer_name(peer)[-6:]


async def swarm_of(lab: Lab, count: int) -> list[Seen]:
    """Members that have made three rounds together, and stand at one head."""
    members: list[Any] = [lab.add(kind=Seen) for _ in range(count)]
    await lab.all_members()
    await lab.rounds(3)
    await lab.until(lambda: len({member.node.driver.head.hash for member in members if not is_moving(member)}) == 1)
    for member in members:
        assert member.says().startswith("healthy:")
    return members


def is_moving(member: Member) -> bool:
    return member.node.driver.head.anchor is None


def hangs(member: Seen) -> Callable[[], None]:
    """Its disk does, from now on; the call that frees it."""
    free, state = anyio.Event(), member.node.driver.state

    async def wait(work: Callable[..., Any], *args: Any) -> Any:
        await free.wait()
        return work(*args)

    def works_again() -> None:
        state.offload = inline
        free.set()

    state.offload = wait  # type: ignore[assignment]
    return works_again


async def stalled(member: Seen, within: float) -> str:
    """What it says once its round is stalled."""
    with anyio.fail_after(within):
        while not (said := member.says()).startswith("stalled:"):
            await anyio.sleep(1.0)
    assert not is_well(Status(health=said))
    return said


def test_a_record_whose_frame_nobody_has_is_a_stall_that_names_the_round_and_whose_frame_it_is(
    run_lab: RunLab, terms: Terms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said "healthy" for two minutes, and then that votes were under way. Until it is put back, that is."""
    monkeypatch.setattr(learner, "PUT_BACK_AFTER", 60.0)

    async def script(lab: Lab) -> None:
        members = await swarm_of(lab, 3)
        head = members[0].node.driver.head
        ref = FrameRef(members[2].signer.peer, bytes(range(32)), 0, 1, 1, head.outer_step)
        commit = commit_of(record_after(head, frames=(ref,)), [member.signer for member in members])
        for member in members:
            assert member.node.driver.head == head
            await member.node.driver.frames.feed(members[2].signer.peer, commit)
        named = f"the frame of {members[2].name} that round {head.outer_step + 1} names"
        for member in members:
            said = await stalled(member, within=20.0)
            assert said.startswith(f"stalled: waiting for {named}: it is decided, and nobody who was asked has it; no ")
            (told,) = member.told("stalled")
            assert (told["round"], told["outer_step"]) == (head.round + 1, head.outer_step + 1)
            assert named in str(told["why"])

    run_lab(terms("sparseloco"), script, make_model=tiny_model)


def test_a_vote_that_does_not_come_is_a_stall_that_names_who_owes_it_and_is_told_once(
    run_lab: RunLab, terms: Terms
) -> None:
    async def script(lab: Lab) -> None:
        one, mute = await swarm_of(lab, 2)
        send = mute.node.driver.frames.send

        async def only_what_binds_nobody(to: PeerId, message: Message) -> None:
            if not isinstance(message, Vote | Promise | Proposal):
                await send(to, message)

        mute.node.driver.frames.send = only_what_binds_nobody  # type: ignore[method-assign]
        heard = {await stalled(one, within=60.0)}
        for _ in range(120):
            await anyio.sleep(1.0)
            heard.add(one.says().partition(": 0")[0].partition(": 1")[0])
        assert all(said.startswith("stalled: waiting for ") and mute.name in said for said in heard), heard
        given = ("votes", "promises")
        assert any(f"waiting for the {what} of {mute.name}" in said for said in heard for what in given), heard
        assert len(one.told("stalled")) == 1
        mute.node.driver.frames.send = send  # type: ignore[method-assign]
        with anyio.fail_after(300.0):
            while not one.says().startswith("healthy:"):
                await anyio.sleep(1.0)
        (over,) = one.told("stall_over")
        assert 120.0 < float(over["seconds"]) < 480.0

    run_lab(terms("sparseloco"), script, make_model=tiny_model)


def test_a_majority_that_vanished_is_named_until_the_run_goes_on_without_it(run_lab: RunLab, terms: Terms) -> None:
    async def script(lab: Lab) -> None:
        members = await swarm_of(lab, 4)
        for gone in members[2:]:
            gone.kill()
        said = await stalled(members[0], within=50.0)
        names = {member.name for member in members[2:]}
        assert "who cannot be reached: a majority of 4 members has to vote" in said
        assert all(name in said for name in names)
        await lab.until(lambda: len(members[0].node.driver.head.members) == 2)
        assert members[0].says().startswith("shrunk:")
        assert (len(members[0].told("stalled")), len(members[0].told("stall_over"))) == (1, 1)

    run_lab(terms("sparseloco", shrink_after=60.0), script, make_model=tiny_model)


def test_a_swarm_below_its_least_number_of_peers_says_that_it_waits_for_one_more(run_lab: RunLab, terms: Terms) -> None:
    async def script(lab: Lab) -> None:
        members = await swarm_of(lab, 3)
        members[2].kill()
        began = anyio.current_time()
        said = await stalled(members[0], within=60.0)
        assert "waiting for more peers: it takes 3 (swarm.min_peers), and 2 are here; " in said
        await anyio.sleep(30.0)
        took = anyio.current_time() - began
        assert took - 20.0 < members[0].status().stalled_seconds <= took + 1.0

    run_lab(terms("sparseloco", min_peers=3, shrink_after=600.0), script, make_model=tiny_model)


def test_who_a_record_drops_says_by_whom_and_in_which_round_until_it_is_a_member_again(
    run_lab: RunLab, terms: Terms
) -> None:
    """It was "healthy" with nobody's round to contribute to."""

    async def script(lab: Lab) -> None:
        members = await swarm_of(lab, 3)
        head, dropped = members[0].node.driver.head, members[2]
        left = tuple(sorted(member.signer.peer for member in members[:2]))
        commit = commit_of(record_after(head, next_members=left), [member.signer for member in members[:2]])
        leader = VOTING.leaders(head)[0]
        for member in members:
            await member.node.driver.frames.feed(left[0], commit)
        said = dropped.says()
        assert said.startswith(f"out: left out of the run by {short(leader)} in round {head.outer_step}, 0 s ago; ")
        assert not is_well(Status(health=said))
        (told,) = dropped.told("left_out")
        where = {"round": head.round + 1, "epoch": head.epoch + 1, "outer_step": head.outer_step}
        assert told == {**where, "leader": peer_name(leader)}
        assert not members[0].told("left_out")
        await lab.until(lambda: dropped.node.driver.state.is_member)
        assert dropped.status().left_out_seconds is None
        await lab.rounds(2)
        assert dropped.says().startswith("healthy:")

    run_lab(terms("sparseloco"), script, make_model=tiny_model)


def test_who_said_farewell_was_not_left_out(run_lab: RunLab, terms: Terms) -> None:
    async def script(lab: Lab) -> None:
        members = await swarm_of(lab, 3)
        rests = members[2].node.driver.membership
        await rests.say_goodbye()
        await lab.until(lambda: all(len(member.node.driver.head.members) == 2 for member in members))
        assert not members[2].told("left_out")
        assert members[2].status().left_out_seconds is None

    run_lab(terms("sparseloco"), script, make_model=tiny_model)


def test_who_does_not_keep_up_says_where_the_others_are_until_it_has_caught_up(run_lab: RunLab, terms: Terms) -> None:
    """Its disk hangs: what was decided is not written, and the rounds of the others go on."""

    async def script(lab: Lab) -> None:
        members = await swarm_of(lab, 3)
        slow = members[2]
        works_again = hangs(slow)
        await lab.until(lambda: members[0].rounds >= slow.rounds + 5)
        await lab.until(lambda: slow.says().startswith("behind:"), limit=30.0)
        status = slow.status()
        assert status.others_round is not None
        assert members[0].rounds - 2 <= status.others_round <= members[0].rounds
        where = f"the others are in round {status.others_round}, this peer in {status.round}"
        assert health_sentence(status) == f"behind: {where}"
        assert not is_well(Status(health=slow.says()))
        assert members[0].says().startswith("healthy:")
        works_again()
        await lab.until(lambda: slow.node.driver.state.is_member and slow.rounds + 1 >= members[0].rounds)
        await lab.until(lambda: slow.status().others_round is None)

    run_lab(terms("sparseloco"), script, make_model=tiny_model)


def test_a_peer_whose_disk_hangs_says_that_the_round_waits_for_itself(run_lab: RunLab, terms: Terms) -> None:
    async def script(lab: Lab) -> None:
        members = await swarm_of(lab, 2)
        slow = members[1]

        def is_applying() -> bool:
            return slow.node.driver.head.anchor is None

        await lab.until(lambda: slow.node.driver.machine.state.acceptor.accepted is not None)
        works_again = hangs(slow)
        await lab.until(is_applying)
        said = await stalled(slow, within=30.0)
        made = slow.node.driver.head.outer_step
        assert said.startswith(f"stalled: waiting for this peer itself: what round {made} decided is not written or ")
        works_again()
        await lab.until(lambda: not is_applying())

    run_lab(terms("sparseloco"), script, make_model=tiny_model)


def test_one_member_that_lies_about_its_round_makes_nobody_behind(run_lab: RunLab, terms: Terms) -> None:
    async def script(lab: Lab) -> None:
        members = await swarm_of(lab, 3)
        liar, update = members[2], members[2].node.directory.own.update
        liar.node.directory.own.update = lambda **said: update(**{**said, "round": 2**40})  # type: ignore[method-assign]
        await anyio.sleep(30.0)
        assert members[0].node.directory.live()[liar.signer.peer].round == 2**40
        assert members[0].status().others_round is None

    run_lab(terms("sparseloco"), script, make_model=tiny_model)
