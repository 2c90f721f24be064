"""A watch on the others: which peers are silent, stand on another chain, or know what this peer's disk forgot."""

from __future__ import annotations

from dataclasses import dataclass

from decentral.rounds.local_state import LocalState, SwarmAccess
from decentral.wire.keys import PeerId


@dataclass(frozen=True, slots=True)
class Absent:
    """The members that are silent, and for how long."""

    missed: frozenset[PeerId]  # nothing is heard of them now
    expired: frozenset[PeerId]  # for half a lease: nobody waits for them
    gone: frozenset[PeerId]  # for ``shrink_after``, here or on this chain: they are given up


class PeerWatch:
    """The view of one peer of the others, from their leases and from when they were last heard."""

    def __init__(self, state: LocalState, swarm: SwarmAccess) -> None:
        self.state, self.directory, self.clock = state, swarm.directory, swarm.clock
        self.lease, self.shrink_after = swarm.lease, swarm.shrink_after
        self._heard: dict[PeerId, float] = {}
        self._parted: set[PeerId] = set()
        self._looked: float | None = None
        self._looked_at_clock = 0.0
        self._asked_since: float | None = None
        self._rivals: dict[PeerId, float] = {}
        self.others_stand_at: int | None = None  # height of the chain, while this peer is behind; None: it is not
        self._passed_since: float | None = None  # since when it lacks two rounds

    def heard(self, peer: PeerId, now: float) -> None:
        """Note that something came from ``peer``."""
        if peer not in self._parted:
            self._heard[peer] = now

    def absent(self, now: float) -> Absent:
        """Return the members not heard of for a part of a lease, for half of one, and for so long that they are given
        up.

        A member that is here and goes on on another branch is silent on this one: two of four that were given up by
        the other two could else not go on for as long as these are heard.
        """
        live, members = self.directory.live(), self.state.head.members
        for peer in members:
            if (peer in live and not self._is_parted(peer)) or peer not in self._heard:
                self._heard[peer] = now
        silent = {peer: now - self._heard[peer] for peer in members if peer != self.state.me}
        missed = frozenset(peer for peer, s in silent.items() if s > self.lease / 8)
        expired = frozenset(peer for peer in missed if silent[peer] > self.lease / 2)
        return Absent(missed, expired, frozenset(peer for peer in expired if silent[peer] > self.shrink_after))

    def note_parted(self, peer: PeerId) -> None:
        """Note that ``peer`` is on a branch that this one does not take."""
        self._parted.add(peer)

    def _is_parted(self, peer: PeerId) -> bool:
        """Tell whether it still is, by its lease."""
        if peer in self._parted:
            lease = self.directory.live()[peer]
            if self.state.machine.state.history.at((lease.round, lease.digest)) is not None:
                self._parted.discard(peer)
        return peer in self._parted

    def slept(self, now: float) -> float:
        """Return the seconds in which this process stood still since the last look: 0, unless it was half a lease or
        more.

        By a clock that goes on while the machine sleeps, too. That time is nobody else's silence: a laptop that was
        shut for longer than ``shrink_after`` gave up all the others the moment it woke, and committed a round of its
        own that they had committed long ago.
        """
        clock = self.clock()
        here = now - (now if self._looked is None else self._looked)
        slept = max(here, clock - self._looked_at_clock if self._looked is not None else 0.0)
        self._looked, self._looked_at_clock = now, clock
        if here > self.lease / 2:
            self._heard = {peer: min(now, heard + here) for peer, heard in self._heard.items()}
        return slept if slept > self.lease / 2 else 0.0

    def look_who_answers(self, now: float) -> None:
        """Look, while this peer is coming back, which others have said since where they stand, and that it is here. A
        peer that stands elsewhere is asked at once.
        """
        machine = self.state.machine.state
        returning = machine.returning
        if returning is None:
            return
        for peer, lease in self.directory.live().items():
            heard = self.directory.heard(peer)
            if heard is None or now - heard < returning.since:
                continue
            if lease.round >= self.state.head.round and machine.history.at((lease.round, lease.digest)) is None:
                self.state.catch_up.ask(peer)
            else:
                returning.note_answer(peer)

    def look_who_remembers(self, now: float) -> None:
        """Look whether others remember rounds that this peer's disk forgot, or a vote that binds it in vain: once all
        members were here for a lease and nobody stood further, go on without. All that time they are asked for what is
        missing.
        """
        round_, head = self.state.machine.state, self.state.head
        if not (round_.forgetful or round_.is_bound_in_vain) or not self._nobody_stands_further():
            self._asked_since = None
            return
        self._asked_since = now if self._asked_since is None else self._asked_since
        if now - self._asked_since > self.lease:
            round_.forget() if round_.forgetful else round_.forget_what_it_accepted()
            self._asked_since = None
            self.state.on_event("forgot", {"round": head.round, "outer_step": head.outer_step})

    def _nobody_stands_further(self) -> bool:
        """Tell whether all members that are not given up are here, and nobody who is here is further than this peer."""
        head, live = self.state.head, self.directory.live()
        asked = set(head.members) - {self.state.me, *self.state.machine.state.presence.given_up()}
        return asked <= live.keys() and all(lease.round <= head.round for lease in live.values())

    def look_for_other_chains(self, now: float) -> None:
        """Look for a peer two rounds ahead, or one round for long: we missed a commit. One that stays on another
        branch: either must adopt. A member may stand there, too, that left us out in the same round. Members come last,
        and so first.

        Branches come from a partition, or from a chain that was given up and came back; comparing them is the
        catch-up's work, and both sides start it, so it does not matter which is the longer.
        """
        head, rivals = self.state.head, {}
        members = frozenset(head.members)
        for peer, lease in sorted(self.directory.live().items(), key=lambda one: one[0] in members):
            if lease.round > head.round + 1:
                self.state.catch_up.ask(peer)
            elif lease.digest != head.hash and (lease.round >= head.round or self._is_outside(peer)):
                rivals[peer] = self._rivals.get(peer, now)
        for peer, since in rivals.items():
            if now - since > self.lease:
                rivals[peer] = now
                self.state.catch_up.ask(peer)
        self._rivals = rivals

    def look_how_far_the_others_are(self, now: float) -> None:
        """Look whether this peer is behind: it lacks two rounds, by the leases of more than half of the other members
        that are here, for longer than a lease: a replay takes a moment, a lease tells a round late, and one that lies
        moves nobody.
        """
        state, live = self.state, self.directory.live()
        stand_at = sorted(live[peer].round for peer in state.head.members if peer != state.me and peer in live)
        passed_by = stand_at[(len(stand_at) - 1) // 2] if stand_at and not state.gossips else 0
        if passed_by < state.head.round + 2:
            self._passed_since = self.others_stand_at = None
            return
        self._passed_since = now if self._passed_since is None else self._passed_since
        self.others_stand_at = passed_by if now - self._passed_since > self.lease else None

    def _is_outside(self, peer: PeerId) -> bool:
        return peer not in self.state.head.members and peer not in self.state.machine.state.joiners

    def lacks_the_end(self, peer: PeerId) -> bool:
        """Tell whether a peer is here and has not reached this peer's head, as far as it said."""
        lease, machine = self.directory.live().get(peer), self.state.machine
        if lease is None or peer in machine.state.presence.leaving:
            return False
        return max(lease.round, machine.state.stands_at.get(peer, 0)) < self.state.head.round
