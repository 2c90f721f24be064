"""Gossip steps: two peers swap frames, the method's channels, and both apply the pair's mean, or neither.

A peer whose partner does not come takes its step alone. The mean of the two slow weights is conserved up to float
rounding, and what compression loses of the changes is owed: booked with the step, never before it
(`decentral.replica.pair_step`).
Sent per step: one body to one peer, whatever the size of the swarm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import anyio
from torch import Tensor

from decentral.consensus.chain import NOTHING, Head
from decentral.dissemination.reduce import partner_of
from decentral.replica.pair_step import GossipStep, half_of, install, stay, step_alone, step_together
from decentral.rounds.driver import Driver
from decentral.rounds.pairs.partners import AHEAD, Partners
from decentral.rounds.pairs.swapping import Swap, Swapping
from decentral.wire.frames import Frame, FrameKind, Header, seal
from decentral.wire.keys import PeerId

# Shape suffix: N = elements of one fragment, flat float32.


@dataclass(frozen=True, slots=True)
class Swapped:
    """The outcome of one gossip step on one fragment."""

    step: int
    before_N: Tensor
    after_N: Tensor
    partner: PeerId | None  # None: taken alone
    disagreement: float | None  # rms of (ours - theirs) over rms of ours
    buffers_B: Tensor | None = None  # what the live buffers become; None: they stay
    unmoved: bool = False  # the step could not be used: what was learnt for it is given up
    meets: bool = True  # whether pairs meet in this step; False: everybody takes it alone
    matched: bool = True  # whether this peer was to meet one; False: nobody meets, or their number is odd


class Gossip:
    """This peer's gossip steps; membership comes from the driver's chain."""

    def __init__(self, driver: Driver, partners: Partners) -> None:
        """``partners``: those that the driver tells of the frames that come."""
        self.driver, self.state, self.partners = driver, driver.state, partners
        self.swapping = Swapping(driver, partners)
        self.is_swapping = False  # whether a step is under way: its other half may have stepped already
        self._settled = partners.step  # no step below it may be taken again: by a pair, or by a previous incarnation

    @property
    def step(self) -> int:
        """Gossip steps that this peer has made, or follows others as if it had."""
        return self.partners.step

    def follow(self, step: int) -> None:
        """Go on from the replica of a peer that is at ``step``."""
        self.partners.step = step

    async def exchange(
        self,
        fragment: int,
        change_N: Tensor,
        steps: int,
        tokens: int,
        tail: bytes = b"",
        states: tuple[Tensor, ...] = (),
    ) -> Swapped:
        """One gossip step: swap with this step's partner if it comes in time, else step alone.

        ``change_N`` and ``states``: the method's channels that are due. ``tail``: this peer's buffers, where fragment
        0 carries them.
        """
        self.is_swapping = True
        try:
            return await self._exchange(fragment, change_N, steps, tokens, tail, states)
        finally:
            self.is_swapping = False

    async def _exchange(
        self, fragment: int, change_N: Tensor, steps: int, tokens: int, tail: bytes, states: tuple[Tensor, ...]
    ) -> Swapped:
        state, head, step = self.state, self.state.head, self.step
        half = theirs = swap = None
        partner = self._partner(head)
        if partner is not None and state.machine.state.presence.present(partner):
            half = await state.offload(half_of, state.replica, fragment, change_N, states)
            if half.feedback:
                await state.offload(state.ledger.swap_begins)
            header = self._header(head, fragment, steps, tokens, len(states))
            swap = Swap(step, await state.offload(seal, header, half.body, state.signer, tail), partner)
            theirs = await self.swapping.swap(swap)
        if tail:
            self._merge_buffers(tail, None if swap is None else swap.theirs)
        if half is None or theirs is None:
            alone = await self._made(partial(step_alone, state.replica, fragment, step, change_N, states))
            return self._book(fragment, None, alone, matched=partner is not None)
        self._settled = step + 1
        together = await self._made(partial(step_together, state.replica, fragment, step, half, theirs))
        self.driver.looking.at_pair(step, fragment, half, theirs, together)
        return self._book(fragment, partner, together)

    def _partner(self, head: Head) -> PeerId | None:
        """Whom this peer is to meet; None: nobody meets in this step, or one is left over and it is this one."""
        if not self.state.is_member or not self._meets(self.step):
            return None
        partner = partner_of(head.run, self.step, head.members, self.state.me)
        if partner is not None:  # a send that failed in an earlier step: no message of rounds undoes it
            self.state.machine.state.presence.heard(partner)
        return partner

    async def _made(self, work: Callable[[], GossipStep]) -> GossipStep:
        """The step that both agreed on, which the partner takes: nothing that cancels may come between."""
        with anyio.CancelScope(shield=True):
            taken = await self.state.offload(work)
        return taken

    def _fall_in(self) -> None:
        """Go to the step that most of the members heard of are at.

        A peer that is behind would wait at every step for a partner that has passed it, and fall back further. One
        that took steps alone while it was cut off is ahead, and would wait at every step for one that does not come: it
        goes back as far as those steps reach.
        """
        members = self.state.head.members
        ahead, back = max(0, self.partners.front(members) - self.step), self.partners.lead(members)
        back = min(back, self.step - self._settled) if back > AHEAD else 0
        self.partners.move(ahead - back)
        if back:
            self.swapping.forget_from(self.step)

    def _meets(self, step: int) -> bool:
        """Whether the method lets pairs meet in a step of the run."""
        return self.state.replica.method.meets(step // self.partners.num_fragments)

    def _book(self, fragment: int, partner: PeerId | None, taken: GossipStep, *, matched: bool = True) -> Swapped:
        replica, step = self.state.replica, self.step
        if replica.anchors[fragment] is not taken.before_N:
            taken = stay(replica, fragment, "the replica was merged with all others meanwhile")
        if taken.unmoved:
            self.state.on_event("unmoved", {"round": step, "method": replica.method.name, "why": taken.unmoved})
        install(replica, fragment, taken)
        self.partners.step += 1
        self._fall_in()  # here, not when the next step begins: the caller reads from ``step`` which fragment that is of
        buffers_B = replica.shared_buffers(fragment)
        moved = (taken.before_N, taken.after_N, partner, taken.disagreement, buffers_B)
        return Swapped(step, *moved, unmoved=bool(taken.unmoved), meets=self._meets(step), matched=matched)

    def _merge_buffers(self, tail: bytes, theirs: Frame | None) -> None:
        """What both told becomes the same on both sides; a peer that steps alone has its own."""
        replica = self.state.replica
        told = {self.state.me: replica.tail.unpack(tail)}
        if theirs is not None and (theirs_B := replica.tail.split(theirs)[1]) is not None:
            told[theirs.header.sender] = theirs_B
        replica.buffers_B = replica.tail.merged([told[peer] for peer in sorted(told)])

    def _header(self, head: Head, fragment: int, steps: int, tokens: int, states: int) -> Header:
        return Header(
            kind=FrameKind.SWAP, run=head.run, epoch=head.epoch, round=self.step, fragment=fragment, part=0, parts=1,
            plan=0, base=NOTHING, sender=self.state.me, steps=steps, tokens=tokens, states=states,
        )  # fmt: skip
