"""The status of a peer that talks to the swarm, and why its round stays open. Made on the swarm's loop."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import anyio

from decentral.consensus.chain import majority
from decentral.consensus.paxos import Ballot
from decentral.consensus.round_state import RoundState
from decentral.errors import DecentralError, DiskError
from decentral.flow.pacing import lease_bits
from decentral.node.node import Node
from decentral.observe.health import in_units, list_names
from decentral.observe.status import Status
from decentral.peer.boundary import Boundary
from decentral.peer.given import share_given
from decentral.peer.participation import Participation
from decentral.peer.saved import count_free
from decentral.peer.settings import Settings
from decentral.peer.shown import Announcer
from decentral.swarm.leases import LeaseTable, name_in
from decentral.training.outer_loop import LoopControl
from decentral.training.reporting import Counters, usual
from decentral.wire.keys import Digest, PeerId, peer_name
from decentral.wire.messages import MAX_PEERS, PRIVATE, Lease, Record

logger = logging.getLogger("decentral.peer")


class NewestStatus:
    """The status of one peer: asked of its swarm side while that runs, and then the last that this gave."""

    def __init__(self, settings: Settings, announce: Announcer, control: LoopControl, boundary: Boundary) -> None:
        self.stalls = StallWatch(announce)
        self.parting = ""  # how it ended, once all is over
        self._control, self._boundary = control, boundary
        self._last = Status(
            run=settings.manifest.run.name,
            run_id=settings.manifest.digest.hex(),
            algorithm=settings.manifest.outer.method,
            own_loop=True,
            trains_while_paused=True,
        )

    def ask(self, part: Participation | None) -> Status:
        """Return it; ``part``, once there is a swarm side. On any thread."""
        if part is not None and part.swarm.alive:
            with suppress(RuntimeError, CancelledError):  # the loop ended between the question and the answer
                found = part.swarm.call(self._make, part)
                if found.inner_steps >= self._last.inner_steps:  # two threads ask: an older answer may come late
                    self._last = found
        return self._last

    def ask_for_people(self, part: Participation | None) -> Status:
        """Return the same, and at the end how it ended."""
        status = self.ask(part)
        return replace(status, state=self.parting) if self.parting else status

    def ends_as(self, state: str) -> None:
        """Have the last one say that."""
        self._last = replace(self._last, state=state)

    def ends_by(self, error: DecentralError) -> None:
        """Have it say that it has left, and can be started again: it waited as was asked, or its disk ended it."""
        problem = str(error) if isinstance(error, DiskError) else ""
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.ENOSPC, errno.EDQUOT):
            problem = "the disk is full; free some space"
        self._last = replace(self._last, state="left", problem=problem, write_failed=int(bool(problem)))

    async def _make(self, part: Participation) -> Status:
        count, done = self._boundary.count.value, self._boundary.done
        return status_of(part, self.stalls, self._control, inner_steps=count, done=done)


def status_of(part: Participation, stalls: StallWatch, control: LoopControl, *, inner_steps: int, done: bool) -> Status:
    """Return everything that a status tells."""
    node, reporter, transport = part.swarm.node, part.reporter.counters, part.swarm.transport
    manifest, diagnosed = node.manifest, part.diagnostics.of_newest_round
    measuring = node.speed.count
    sent, received, up, down = _rates(part)
    outcomes, fetched = reporter.outcomes, node.catch_up.snapshots.under_way
    now, head, left_out = anyio.current_time(), node.driver.head, node.driver.state.left_out
    stalled_seconds, stalled_by = stalls.look(node, reporter, now, (up, down))
    others_stand_at = node.driver.watch.others_stand_at
    given, me, name = part.giving.now(), peer_name(node.driver.state.me), part.settings.options["name"] or ""
    went_on = node.driver.state.went_on if node.driver.state.given_up else None
    return Status(
        state=state_of(node, reporter, control, done=done, looks=looks_for_machines(part)),
        peer=me,
        name=name,
        names=_names_known(node.directory.table) | ({me: name} if name else {}),
        run=manifest.run.name,
        run_id=manifest.digest.hex(),
        algorithm=manifest.outer.method,
        round=node.outer_steps,
        rounds=manifest.run.rounds,
        epoch=head.epoch,
        inner_steps=inner_steps,
        members=tuple(_member(part, member, done=done) for member in head.members),
        shares=part.sharing is not None,
        stages=_stages(part),
        given_up=tuple(peer_name(member) for member in sorted(node.driver.state.given_up)),
        given_up_seconds=None if went_on is None else now - went_on.since,
        given_up_rounds=0 if went_on is None else head.outer_step - went_on.outer_step,
        late_rounds=None if node.gossip is not None else _late_rounds(node),
        waiting_for=_absent_offerers(node) if reporter.stands_still else (),
        stalled_seconds=stalled_seconds,
        stalled_by=stalled_by,
        left_out_seconds=None if left_out is None else now - left_out.since,
        left_out_round=0 if left_out is None else left_out.outer_step,
        left_out_by="" if left_out is None or left_out.leader is None else peer_name(left_out.leader),
        others_round=None if others_stand_at is None else _outer_steps(node, others_stand_at),
        usual_round_seconds=reporter.usual_round,
        held_seconds=usual(reporter.held_seconds),
        checkpoint_held_seconds=usual(reporter.taking_seconds),
        wanted_members=reporter.wanted_members,
        gone=tuple(peer_name(member) for member in sorted(node.company.gone)),
        gone_left=node.company.left,
        rounds_seen=len(outcomes),
        rounds_contributed=sum(outcomes),
        bytes_sent=sent,
        bytes_received=received,
        bytes_measuring=measuring.sent,
        bytes_per_round=reporter.traffic.per_round(sent, reporter.num_outcomes),
        model_here=fetched[0],
        model_nbytes=fetched[1],
        sent_per_second=up,
        received_per_second=down,
        max_upload=part.links.caps.up,
        max_download=part.links.caps.down,
        daily_upload=None if node.daily_upload is None else node.daily_upload.limit,
        sent_today=0 if node.daily_upload is None else node.daily_upload.sent,
        written_today=part.writes.today,
        max_writes=part.writes.limit,
        disk_free=count_free(part.settings.out),
        checkpoint_nbytes=part.writes.newest,
        given_rounds=given.rounds,
        given_tokens=given.tokens,
        given_seconds=given.seconds,
        given_bytes=given.sent,
        given_share=share_given(given.rounds, head.contributions),
        uplink_bits=lease_bits(node.uplink()),
        next_sync_seconds=reporter.next_round_in,
        seconds_left=_left(node, reporter),
        loss=reporter.loss,
        notices=part.announce.notices.now(head.round),
        diagnostics=part.diagnostics.values,
        diagnosed_round=diagnosed.outer_step,
        diagnosed_part=diagnosed.of_part,
        out_of_band=part.diagnostics.out,
        held_out_loss=reporter.held_out_loss,
        num_parameters=sum(anchor_N.numel() for anchor_N in node.replica.anchors),
        open_round=_open_round(node),
        kinds={_kind(protocol): [count.sent, count.received] for protocol, count in transport.traffic.kinds.items()},
        own_loop=True,
        trains_while_paused=True,
        anchor_digest=node.replica.digest.hex(),
        invite=part.invite_to_write,
        addresses=transport.addresses(),
        reachability=part.network.kind,
        relays=part.network.relays,
        silent_relays=part.network.watch.silent,
    )


def _rates(part: Participation) -> tuple[int, int, float, float]:
    """Return bytes sent and received without those that measured lines, and both per second."""
    total, measuring = part.swarm.transport.traffic.total, part.swarm.node.speed.count
    sent, received = total.sent - measuring.sent, total.received - measuring.received
    return sent, received, *part.reporter.counters.traffic.per_second(sent, received)


def looks_for_machines(part: Participation) -> bool:
    """Tell whether it trains nothing until it is one replica with others."""
    return part.sharing is not None and part.sharing.inbox is None


def _stages(part: Participation) -> tuple[dict[str, object], ...]:
    """Return the stages of the replica that this peer is in, and which of them each waits for."""
    if part.sharing is None or (inbox := part.sharing.inbox) is None:
        return ()
    members, waiting = inbox.record.members, inbox.waiting
    return tuple(
        {
            "peer": peer_name(peer),
            "first": first,
            "stop": stop,
            "self": peer == part.identity.peer,
            "waits_for": None if (whom := waiting.get(peer, peer)) == peer else members.index(whom),
        }
        for peer, first, stop in inbox.record.stages
    )


def state_of(node: Node, reporter: Counters, control: LoopControl, *, done: bool, looks: bool = False) -> str:
    """Return in one word what the peer does; ``looks``: for machines to share a replica with."""
    if done:
        return "leaving" if control.leaving else "done"
    if node.state in ("leaving", "syncing"):
        return str(node.state)
    if not node.ready.is_set():
        return "starting"
    if control.paused:
        return "paused"
    if reporter.wanted_members:
        return "waiting"
    if node.resting.reasons:
        return "resting"
    if reporter.stands_long:
        return "waiting"
    alone = not node.directory.live()
    return "looking" if alone else "waiting" if looks else "training"


def _member(part: Participation, member: bytes, *, done: bool) -> dict[str, object]:
    node = part.swarm.node
    lease = node.directory.live().get(member)
    here = member == node.driver.state.me
    count = part.swarm.transport.traffic.of(member)
    return {
        "peer": peer_name(member),
        "name": _name_of(part, lease, here=here),
        "self": here,
        "live": here or lease is not None,
        "left": not here and lease is None and (done or node.directory.left_politely(member)),
        "round": node.outer_steps if here else _round_of(node, lease),
        "trains": _trains(node, member),
        "bytes_sent": count.sent,
        "bytes_received": count.received,
        **({} if here else _way(part, member)),
    }


def _trains(node: Node, member: bytes) -> list[int] | None:
    """Return the fragments that a member trains, the first and the one after the last; None: all of them."""
    if not node.driver.state.running:
        return None  # it has just begun to ask for the anchor
    part = node.driver.machine.state.presence.parts.get(member)
    return None if part is None else [part.start, part.stop]


def _names_known(table: LeaseTable) -> dict[str, str]:
    """Return what others call themselves, those who are gone as far as room is: sentences tell of them, too."""
    return {peer_name(lease.peer): name for lease in table.lately()[:MAX_PEERS] if (name := name_in(lease))}


def _name_of(part: Participation, lease: Lease | None, *, here: bool) -> str:
    """Return what a member calls itself; empty: nothing, or it is gone."""
    if here:
        return part.settings.options["name"] or ""
    return "" if lease is None else name_in(lease)


def _round_of(node: Node, lease: Lease | None) -> int | None:
    """Return the outer steps of another member, from the height that its lease tells; in gossip none tells them."""
    if lease is None or node.gossip is not None:
        return None
    return _outer_steps(node, lease.round)


def _outer_steps(node: Node, height: int) -> int:
    return node.driver.machine.state.history.outer_steps_at(height)


def _late_rounds(node: Node) -> int:
    """Count the rounds whose inner steps a peer may bring back after others went on without it: see `share_of`."""
    return node.driver.state.terms.max_staleness + node.manifest.outer.fragments


def _way(part: Participation, member: bytes) -> dict[str, object]:
    """Return how a member is reached; directly although both are private is punched."""
    node = part.swarm.node
    path, lease = node.paths.get(member), node.directory.live().get(member)
    if path is None and lease is not None:
        node.paths.look_soon()  # the next status has it
    hidden = lease is not None and bool(lease.state & PRIVATE) and part.network.is_private
    names = {None: None, False: "relayed", True: "punched" if hidden else "direct"}
    return {
        "path": names[None if path is None else path.direct],
        "relayed_share": None if path is None else round(path.relayed_share, 3),
        "answers_in": node.directory.answer_seconds.get(member),
        "seen": node.directory.heard(member),
        "uplink_bits": 0 if lease is None else lease.uplink,
    }


def _open_round(node: Node) -> dict[str, object] | None:
    """Return what this peer knows of the round in progress; None where there is none, as in gossip and at the end."""
    if node.gossip is not None or not node.ready.is_set() or node.driver.head.final:
        return None
    state, head = node.driver.machine.state, node.driver.head
    ballot, leading = max(0, state.acceptor.promised), state.leading
    voted = leading is not None and leading.proposal is not None
    return {
        "round": head.outer_step + 1,
        "members": len(_offerers(state)),
        "offers": sum(peer in state.round.offers for peer in _offerers(state)),
        "leader": peer_name(state.leader_of(ballot)),
        "ballot": ballot,
        "proposed": voted or state.proposal is not None,
        "votes": len(leading.votes) if leading is not None and voted else None,  # they go to the leader only
        "seconds": round(anyio.current_time() - state.round.opened, 3),
    }


def _offerers(state: RoundState) -> list[PeerId]:
    """Return those who train the fragment whose turn it is; of a large swarm those of whom this peer hears what they
    offer.
    """
    return [peer for peer in state.offerers if state.presence.trains(peer, state.fragment)]


def _kind(protocol: str) -> str:
    """Return ``frame`` of ``/decentral/frame/1``."""
    return protocol.split("/")[-2] if protocol.count("/") > 2 else protocol


def _absent_offerers(node: Node) -> tuple[str, ...]:
    machine = node.driver.machine
    offered = set(machine.state.round.offers)
    absent = [p for p in _offerers(machine.state) if p not in offered and machine.state.presence.present(p)]
    return tuple(peer_name(p) for p in absent)


def _left(node: Node, reporter: Counters) -> float | None:
    """Return the seconds until the last round, or until the run's time is up; None: neither is known."""
    run, known = node.manifest.run, []
    if (usual := reporter.own_round) is not None:
        known.append(max(0, run.rounds - node.outer_steps) * usual)
    if run.minutes is not None:
        known.append(max(0.0, 60 * run.minutes - node.age))
    return min(known, default=None)


# ---- a stall ----
#
# When no round has ended for many times as long as one takes: since when, and what the round in progress waits for.

STALLED_AFTER = 5.0  # usual rounds: two deaths in one round, whose leases run out one after the other, take three
STEPS_ALONE = 4  # gossip steps in a row without a partner
LOOK_EVERY = 1.0  # s


class StallWatch:
    """A watch over one peer's rounds, which tells once that a stall began, and once that it is over."""

    def __init__(self, emit: Callable[[str, dict[str, object]], None]) -> None:
        """``emit``: takes an event and its fields."""
        self._emit = emit
        self._stalled: tuple[int, float] | None = None  # the height it began at, and when that was told
        self._decided: tuple[Digest, float] | None = None  # whose frames are awaited, and since when

    async def watch(self, part: Participation) -> None:
        """Look once in ``LOOK_EVERY`` until cancelled; a mistake in what is said must not end what is watched."""
        while True:
            await anyio.sleep(LOOK_EVERY)
            if part.is_up:
                try:
                    self.look(part.swarm.node, part.reporter.counters, anyio.current_time(), _rates(part)[2:])
                except Exception:
                    logger.exception("the round in progress could not be looked at; training is not affected")

    def look(
        self, node: Node, reporter: Counters, now: float, rates: tuple[float, float] = (0.0, 0.0)
    ) -> tuple[float, str]:
        """Return the seconds without a round and why; (0, "") while that is as usual. ``rates``: bytes/s sent and
        received.
        """
        seconds, why = self._find_stall(node, reporter, now, rates)
        height = node.driver.head.round
        if why and self._stalled is None:
            self._stalled = height, now - seconds
            self._emit("stalled", {"round": height + 1, "outer_step": node.outer_steps + 1, "why": why})
        elif not why and self._stalled is not None:
            began, self._stalled = self._stalled[1], None
            if node.driver.membership.stopping:
                return seconds, why  # it is waited for no more, and nothing has ended
            self._emit(
                "stall_over", {"round": height, "outer_step": node.outer_steps, "seconds": round(now - began, 3)}
            )
        return seconds, why

    def _find_stall(self, node: Node, reporter: Counters, now: float, rates: tuple[float, float]) -> tuple[float, str]:
        if (
            not node.ready.is_set()
            or node.driver.head.final
            or reporter.wanted_members
            or node.driver.membership.stopping
        ):
            return 0.0, ""
        if node.gossip is not None:
            return _alone_too_long(reporter)
        seconds, usual = max(
            self._of_agreeing(node, now), _of_gathering(node, reporter, now), key=lambda found: found[0] - found[1]
        )
        goes_on = self._stalled is not None and self._stalled[0] == node.driver.head.round
        if seconds <= usual and not goes_on:  # what counts as usual may change meanwhile
            return 0.0, ""
        return seconds, why_open(_seen(node, rates))

    def _of_agreeing(self, node: Node, now: float) -> tuple[float, float]:
        """Return the seconds for which a leader is due, as the committee sees, or a decided record waits for frames or
        to be applied, and the most that this takes: nobody computes meanwhile, so usual rounds say nothing of it.
        """
        state = node.driver.machine.state
        decided = None if state.decided is None else state.decided[1].record.hash
        if decided is None or self._decided is None or self._decided[0] != decided:
            self._decided = None if decided is None else (decided, now)
        since = state.stalled_since if state.me in state.committee else None
        since = since if self._decided is None else self._decided[1]
        since = since if state.head.anchor is not None else state.round.opened
        takes = node.driver.allowed * (3 if state.reduces else 1)  # slices, results, and both once more; or frames
        return 0.0 if since is None else now - since, 2 * (node.manifest.swarm.lease + state.terms.patience + takes)


def _of_gathering(node: Node, reporter: Counters, now: float) -> tuple[float, float]:
    """Return the seconds for which offers come in, or of the round, and the most that this takes."""
    seen, usual = node.driver.machine.state.round, reporter.usual_round
    since_round = 0.0 if usual is None else reporter.since_round  # before the first nobody knows how long steps take
    seconds = since_round if seen.first_offer is None else now - seen.first_offer
    ceiling = node.manifest.swarm.deadline_ceiling
    return seconds, max(STALLED_AFTER * (usual or 0.0), 2 * (ceiling + node.driver.allowed))


def _alone_too_long(reporter: Counters) -> tuple[float, str]:
    """Return the seconds without a partner and why; a gossip step ends by itself, alone where nobody comes."""
    last = reporter.outcomes[-STEPS_ALONE:]
    if len(last) < STEPS_ALONE or any(last):
        return 0.0, ""
    return reporter.since_contributed, f"waiting for a partner: the last {len(last)} steps were taken alone"


# ---- what a round waits for ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Balloting:
    """The newest ballot of a round, as far as this peer sees it."""

    leader: PeerId
    number: int
    asked: str = ""  # what its leader collects, votes or promises, where that is this peer
    voters: Sequence[PeerId] = ()  # of whom they count
    given: Sequence[PeerId] = ()  # who of these gave one
    needed: int = 0
    owners: Sequence[PeerId] = ()  # who owe results of the plan that this peer leads
    lacks: Sequence[PeerId] = ()  # whose frames the proposal names, and this peer has not
    proposed: bool = False
    voted: bool = False  # by this peer

    @property
    def is_under_way(self) -> bool:
        """Tell whether its leader has done its part, so that offers are not what is missing."""
        return self.proposed or bool(self.asked or self.owners)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRound:
    """The round in progress, as far as this peer knows it."""

    me: PeerId
    members: Sequence[PeerId]
    present: Sequence[PeerId]  # those of them that are here
    min_peers: int
    round: int = 0  # outer steps that are made with it
    voters: Sequence[PeerId] = ()  # none: all members
    offerers: Sequence[PeerId] = ()  # whose offers come here; none: all members
    offered: Mapping[PeerId, int] = field(default_factory=dict)  # bytes of each contribution that was offered
    passes: bool = False  # this peer does not train the fragment whose turn it is
    arrived: Sequence[PeerId] = ()  # whose contributions are here whole, in a reduce all that are offered
    applying: bool = False  # the record before it is decided, and not applied here yet
    nowhere: Sequence[PeerId] = ()  # whose frames a decided record names, and this peer has not
    ballot: Balloting | None = None
    sent_per_second: float = 0.0  # bytes
    received_per_second: float = 0.0

    @property
    def rates(self) -> str:
        """Give what its line carries, for people."""
        return f"{in_units(self.received_per_second)}/s come in and {in_units(self.sent_per_second)}/s go out"


def why_open(seen: OpenRound) -> str:
    """Give what the round waits for and for whom, most telling first."""
    here, voters = len(seen.present), seen.voters or seen.members
    if seen.applying:
        return f"waiting for this peer itself: what round {seen.round - 1} decided is not written or not applied yet"
    if seen.nowhere:
        them = "it" if len(seen.nowhere) == 1 else "them"
        frames = f"{_frames(seen.nowhere)} that round {seen.round} names"
        return f"waiting for {frames}: it is decided, and nobody who was asked has {them}"
    if seen.me not in seen.members:
        return "waiting for the members to let this peer in"
    if here < seen.min_peers:
        return f"waiting for more peers: it takes {seen.min_peers} (swarm.min_peers), and {here} are here"
    absent = [peer for peer in voters if peer not in seen.present]
    if 2 * len(absent) >= len(voters):
        return f"waiting for {_names(absent)}, who cannot be reached: a majority of {len(voters)} members has to vote"
    if seen.ballot is not None and seen.ballot.is_under_way:
        return _why_undecided(seen, seen.ballot)
    if seen.me not in seen.offered and not seen.passes:
        return "waiting for this peer's own loop: it has not made the inner steps of the round"
    awaited = [peer for peer in seen.offerers or seen.members if peer != seen.me or not seen.passes]
    if late := [peer for peer in awaited if peer in seen.present and peer not in seen.offered]:
        return f"waiting for {_names(late)}, who offered nothing"
    if missing := [peer for peer in seen.offered if peer not in seen.arrived]:
        nbytes = sum(seen.offered[peer] for peer in missing)
        return f"waiting for {in_units(nbytes)} of {_names(missing)}, and {seen.rates}: a line may be too thin"
    if seen.ballot is None or seen.ballot.leader == seen.me:
        return f"waiting for what the others lack: {seen.rates}"
    return _why_undecided(seen, seen.ballot)


def _why_undecided(seen: OpenRound, ballot: Balloting) -> str:
    """Give what the ballot waits for; votes and promises are told to its leader alone."""
    leader = f"{_names([ballot.leader])}, who leads ballot {ballot.number}"
    if ballot.owners:
        return f"waiting for the results of {_names(ballot.owners)}, who sum their parts of the reduce: {seen.rates}"
    if ballot.lacks:
        return f"waiting for {_frames(ballot.lacks)} that the proposal names: {seen.rates}"
    if ballot.asked:
        silent = [peer for peer in ballot.voters if peer not in ballot.given]
        given = f"{len(ballot.voters) - len(silent)} of {ballot.needed} are here"
        return f"waiting for the {ballot.asked} of {_names(silent)}: {given}, in ballot {ballot.number}; {seen.rates}"
    if not ballot.proposed:
        return f"waiting for {leader}, to propose the round: {seen.rates}"
    voted = "has voted" if ballot.voted else "has not voted"
    return f"waiting for the votes that are told to {leader}: this peer {voted}; {seen.rates}"


def _seen(node: Node, rates: tuple[float, float]) -> OpenRound:
    state, (up, down) = node.driver.machine.state, rates
    members = state.head.members
    channels = state.terms.states(state.head.outer_step)
    return OpenRound(
        me=state.me,
        members=members,
        present=[peer for peer in members if peer == state.me or state.presence.present(peer)],
        min_peers=node.manifest.swarm.min_peers,
        round=state.head.outer_step + 1,
        voters=state.committee,
        offerers=_offerers(state),
        passes=not state.presence.trains(state.me, state.fragment),
        offered={peer: offer.nbytes for peer, offer in state.round.offers.items()},
        arrived=state.round.usable(state.head, state.held, state.terms.named, channels),
        applying=state.head.anchor is None,
        nowhere=() if state.decided is None else _not_held(state, state.decided[1].record),
        ballot=_balloting(state),
        sent_per_second=up,
        received_per_second=down,
    )


def _balloting(state: RoundState) -> Balloting | None:
    """Return the ballot that is led here if it is the newest, else what its leader has said; None: there is no work
    yet.
    """
    promised, leading = max(0, state.acceptor.promised), state.leading
    if leading is not None and leading.ballot >= promised:
        return _led_here(state, leading)
    if state.proposal is not None and state.proposal[1].ballot >= promised:
        leader, proposal = state.proposal
        voted = state.acceptor.accepted_ballot == proposal.ballot
        lacks = () if voted else _not_held(state, proposal.record)
        return Balloting(leader=leader, number=proposal.ballot, lacks=lacks, proposed=True, voted=voted)
    if state.stalled_since is None:
        return None
    return Balloting(leader=state.leader_of(promised), number=promised)


def _led_here(state: RoundState, leading: Ballot) -> Balloting:
    mine: dict[str, Any] = {"leader": state.me, "number": leading.ballot}  # Any: fields of different types
    if leading.proposal is not None:
        record = leading.proposal.record
        voters, lacks = state.terms.voting.voters_on(record), _not_held(state, record)
        asked: dict[str, Any] = {
            "asked": "votes",
            "voters": voters,
            "given": [*leading.votes],
            "needed": majority(voters),
        }
        return Balloting(**mine, **asked, lacks=lacks, proposed=True, voted=state.me in leading.votes)
    voters = state.voters
    if not leading.is_prepared(voters, majority(voters)):
        asked = {"asked": "promises", "voters": voters, "given": [*leading.promises], "needed": majority(voters)}
        return Balloting(**mine, **asked)
    if leading.planned is not None:
        return Balloting(**mine, owners=sorted(leading.planned.silent_owners(state.results, state.me)))
    return Balloting(**mine)


def _not_held(state: RoundState, record: Record) -> list[PeerId]:
    """Return the senders of frames that a record names and this peer has not; each once."""
    return list(dict.fromkeys(ref.peer for ref in record.frames if ref.frame not in state.held))


def _frames(peers: Sequence[PeerId]) -> str:
    return f"the frame{'s' if len(peers) > 1 else ''} of {_names(peers)}"


def _names(peers: Sequence[PeerId]) -> str:
    return list_names([peer_name(peer) for peer in peers])
