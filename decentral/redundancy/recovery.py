"""The asking side, of a peer that lost its disk: its pieces back from whoever has them, checked, and joined.

Nothing that a keeper says is believed: labels and chunks are sealed by this peer itself. A chunk that does not open, or
does not come, is made up for by another piece; pieces of different states are never joined. The newest state of which
enough pieces come is the one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import anyio

from decentral.errors import PayloadError, TransportError
from decentral.flow.waiting import Offload
from decentral.manifest import Redundancy
from decentral.redundancy.giver import Giver, WayOut
from decentral.redundancy.keeper import KEPT, PIECES_PER_OWNER, STRIPE, Keeper
from decentral.redundancy.pieces import LABEL_NBYTES, SEAL_NBYTES, Label, Seals
from decentral.transport import Transport
from decentral.transport.requests import request
from decentral.wire.keys import PeerId, peer_name

TIMEOUT = 30.0  # s for a keeper to be reached, and to begin its answer
LOOK_FOR = 10.0  # s in which members are met that may have a piece; all of one state ends it sooner
LONGEST = 60.0  # s in which the rest of a state is looked for
LOOK_EVERY = 0.25  # s
AT_ONCE = 16  # peers asked, or stripes fetched, side by side

Held = dict[int, list[PeerId]]  # who has which piece of a state, by its number


@dataclass(frozen=True, slots=True)
class Recovered:
    """A state that came back whole."""

    state: bytes
    round: int
    keepers: tuple[PeerId, ...]  # that were of use


class Recovery:
    """A search for what members keep of this peer."""

    def __init__(
        self, transport: Transport, seals: Seals, live: Callable[[], Collection[PeerId]], offload: Offload
    ) -> None:
        self._transport, self._seals, self._live, self._offload = transport, seals, live, offload
        self._asked, self._pending = set[PeerId](), 0
        self._found: dict[tuple[int, bytes], tuple[Label, Held]] = {}
        self.why = "no member keeps anything of it"  # what was missing, once nothing came back

    async def run(self, look_for: float = LOOK_FOR) -> Recovered | None:
        """Return the newest state that can be had, or None: nothing, rather than a part."""
        began, limiter = anyio.current_time(), anyio.CapacityLimiter(AT_ONCE)
        async with anyio.create_task_group() as group:
            while not self._is_over(anyio.current_time() - began, look_for):
                for peer in [peer for peer in self._live() if peer not in self._asked]:
                    self._asked.add(peer)
                    group.start_soon(self._ask_one, peer, limiter)
                await anyio.sleep(LOOK_EVERY)
            group.cancel_scope.cancel()
        for which in sorted(self._found, reverse=True):
            plan, held = self._found[which]
            fetch = _Fetch(self._transport, self._seals, self._offload, plan, held)
            if await fetch.run():
                return Recovered(bytes(fetch.state), plan.round, tuple(sorted(fetch.used)))
            self.why = f"of the state of round {plan.round}, {fetch.why}"
        return None

    def _is_over(self, seconds: float, look_for: float) -> bool:
        """Tell whether the search has ended. It lasts longer where some pieces of a state are here, and too few.

        All of an older state are no reason to stop while somebody may have a newer one.
        """
        pieces = [(len(held), plan) for plan, held in self._found.values()]
        newest = max(pieces, key=lambda one: one[1].of_state, default=None)
        if newest is not None and newest[0] == newest[1].pieces and not self._pending:
            return True
        some = bool(pieces) and not any(here >= plan.needed for here, plan in pieces)
        return seconds >= (max(look_for, LONGEST) if some else look_for)

    async def _ask_one(self, peer: PeerId, limiter: anyio.CapacityLimiter) -> None:
        """Ask a peer for its labels; those that are not ours, whatever they say, are passed over."""
        limit = PIECES_PER_OWNER * LABEL_NBYTES
        self._pending += 1
        try:
            async with limiter:
                answer = await request(self._transport, peer, KEPT, b"", limit=limit, timeout=TIMEOUT)
            labels = [Label.read(answer[at : at + LABEL_NBYTES]) for at in range(0, len(answer), LABEL_NBYTES)]
        except (TransportError, PayloadError):
            return
        finally:
            self._pending -= 1
        for label in filter(self._seals.is_ours, labels):
            self._found.setdefault(label.of_state, (label, {}))[1].setdefault(label.number, []).append(peer)


class _Fetch:
    """The fetching of one state."""

    def __init__(self, transport: Transport, seals: Seals, offload: Offload, plan: Label, held: Held) -> None:
        self._transport, self._seals, self._offload, self._plan = transport, seals, offload, plan
        self._left = [(number, peer) for number in sorted(held) for peer in held[number]]  # of whom none has failed
        self.state = bytearray()
        self.used = set[PeerId]()
        self.why = ""

    async def run(self) -> bool:
        """Fetch the state; tell whether ``state`` is whole now."""
        plan = self._plan
        if not self._is_enough():
            return False
        self.state = bytearray(plan.stripes * plan.stripe_nbytes)
        for first in range(0, plan.stripes, AT_ONCE):
            async with anyio.create_task_group() as group:
                for stripe in range(first, min(plan.stripes, first + AT_ONCE)):
                    group.start_soon(self._stripe, stripe)
            if not self._is_enough():
                return False
        del self.state[plan.state_nbytes :]
        return True

    def _is_enough(self) -> bool:
        here = len({number for number, _ in self._left})
        self.why = f"{here} of the {self._plan.needed} pieces that are needed are here{self.why and f' ({self.why})'}"
        return here >= self._plan.needed

    async def _stripe(self, stripe: int) -> None:
        opened = dict[int, bytes]()
        while len(opened) < self._plan.needed:
            missing = self._plan.needed - len(opened)
            asked = {number: peer for number, peer in reversed(self._left) if number not in opened}
            if len(asked) < missing:
                return
            async with anyio.create_task_group() as group:
                for number in sorted(asked)[:missing]:
                    group.start_soon(self._chunk, stripe, number, asked[number], opened)
        whole = await self._offload(self._seals.stripe, self._plan, opened)
        at = stripe * self._plan.stripe_nbytes
        self.state[at : at + self._plan.stripe_nbytes] = whole

    async def _chunk(self, stripe: int, number: int, peer: PeerId, opened: dict[int, bytes]) -> None:
        label = self._seals.label(self._plan, number)
        ask, limit = label.to_bytes() + STRIPE.pack(stripe), label.chunk_nbytes + SEAL_NBYTES
        try:
            chunk = await request(self._transport, peer, KEPT, ask, limit=limit, timeout=TIMEOUT)
            opened[number] = self._seals.open_chunk(label, stripe, chunk)
            self.used.add(peer)
        except (TransportError, PayloadError) as error:
            self.why = f"{peer_name(peer)}: {error}"
            if (number, peer) in self._left:
                self._left.remove((number, peer))


# ---- both sides of one peer ----
#
# It keeps for others, and others keep for it.

TIDY_EVERY = 60.0  # s


class RedundancyService:
    """Made before its transport is entered, as it serves."""

    def __init__(
        self,
        terms: Redundancy,
        seals: Seals,
        way_out: WayOut,
        *,
        members: Callable[[], Collection[PeerId]],
        live: Callable[[], Collection[PeerId]],
        offload: Offload,
    ) -> None:
        self.terms, self._seals, self._way_out, self._live, self._offload = terms, seals, way_out, live, offload
        self.keeper = Keeper(way_out.transport, terms, members)
        self.giver = Giver(terms, seals, way_out, offload)

    async def run(self) -> None:
        """Forget who is gone for good, until cancelled."""
        while True:
            self.keeper.forget_old()
            await anyio.sleep(TIDY_EVERY)

    def recovery(self) -> Recovery:
        """Return a search for what others keep of this peer."""
        return Recovery(self._way_out.transport, self._seals, self._live, self._offload)
