"""Frames by their hashes: those that this peer holds, and how it gets those that did not come."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container

from decentral.consensus.round_state import Fetch
from decentral.dissemination.broadcast import FETCH, ChunkedBroadcast, Receiver, fetch, thin_last
from decentral.dissemination.reassembly import NOTHING_CAME, Arrivals
from decentral.errors import PayloadError
from decentral.flow.waiting import Offload
from decentral.transport import Transport
from decentral.transport.requests import serve_requests
from decentral.wire.frames import Frame
from decentral.wire.keys import Digest, PeerId
from decentral.wire.pieces import WANT_NBYTES, Want, read_want

# ---- frames held here ----
#
# They are of the round in progress, and of the last commits for those who missed them.
#
# Frames of the open round are what a commit is applied from, so they are never dropped for want of room: the past goes
# first. Only when the open round itself outgrows what its members can need does the greediest sender lose its newest
# frame, those that are no members before all others: whoever sends frames nobody asked for fills its own share and no
# more.

PER_SENDER = 64  # frames of one sender in one round: one contribution, or the results of some plans


class FrameStore:
    """Frames by hash, those of past rounds dropped first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity  # bytes of all frames together
        self.nbytes = 0
        self._open, self._room = 0, capacity
        self._members: Container[PeerId] = ()
        self._frames: OrderedDict[Digest, Frame] = OrderedDict()
        self._count: Counter[tuple[PeerId, int]] = Counter()

    def __contains__(self, frame: Digest) -> bool:
        return frame in self._frames

    def get(self, frame: Digest) -> Frame | None:
        """The frame with that hash, or None."""
        return self._frames.get(frame)

    def open(self, round_: int, room: int, members: Container[PeerId] = ()) -> None:
        """Round ``round_`` of ``members`` is in progress; frames from it on may take ``room`` bytes even beyond the
        capacity.
        """
        self._open, self._room, self._members = round_, max(room, self.capacity), members

    def has_of(self, sender: PeerId) -> bool:
        """Tell whether a frame of ``sender`` is here for the round in progress, or the next."""
        return any(self._count[sender, round_] for round_ in (self._open, self._open + 1))

    def add(self, frame: Frame) -> list[Digest]:
        """Hold ``frame``; returns what had to go from the open round or later ones, most often nothing.

        Raises PayloadError when its sender has too many in this round already.
        """
        if frame.hash in self._frames:
            return []
        key = (frame.header.sender, frame.header.round)
        if self._count[key] >= PER_SENDER:
            raise PayloadError(f"more than {PER_SENDER} frames of one sender in round {key[1]}; drop its frames")
        self._frames[frame.hash] = frame
        self._count[key] += 1
        self.nbytes += frame.nbytes
        return self._make_room()

    def _make_room(self) -> list[Digest]:
        if self.nbytes <= self.capacity:
            return []
        past = [key for key, frame in self._frames.items() if frame.header.round < self._open]
        for key in past:
            if self.nbytes <= self.capacity:
                return []
            self._drop(key)
        dropped = []
        while self.nbytes > self._room and len(self._frames) > 1:
            dropped.append(self._newest_of_the_greediest())
            self._drop(dropped[-1])
        return dropped

    def _newest_of_the_greediest(self) -> Digest:
        sizes: Counter[PeerId] = Counter()
        for frame in self._frames.values():
            sizes[frame.header.sender] += frame.nbytes
        outsiders = [(sender, nbytes) for sender, nbytes in sizes.items() if sender not in self._members]
        greediest = max(outsiders or sizes.items(), key=lambda item: item[1])[0]
        return next(key for key, frame in reversed(self._frames.items()) if frame.header.sender == greediest)

    def forget_before(self, round_: int) -> None:
        """Drop frames of rounds before ``round_``."""
        for key in [key for key, frame in self._frames.items() if frame.header.round < round_]:
            self._drop(key)

    def _drop(self, key: Digest) -> None:
        frame = self._frames.pop(key)
        self.nbytes -= frame.nbytes
        owner = (frame.header.sender, frame.header.round)
        self._count[owner] -= 1
        if self._count[owner] <= 0:
            del self._count[owner]


# ---- frames that did not come ----
#
# They are asked of their holders, and those held here are given to who asks.
#
# Of what came in pieces only the rest is asked for. Who is sending a frame in pieces sends it to nobody a second time:
# four who each lacked some of a thin peer's frame had all of it once more, one of eight on 2 Mbit/s, and the round
# took 94 s.


class FrameFetcher:
    """Asks for what is missing here, and answers those who miss what is here."""

    def __init__(
        self,
        transport: Transport,
        store: FrameStore,
        arrivals: Arrivals,
        broadcast: ChunkedBroadcast,
        receiver: Receiver,
        offload: Offload,
        limit: int,
    ) -> None:
        """``limit``: bytes of the largest frame."""
        self.transport, self.store, self.arrivals, self.broadcast = transport, store, arrivals, broadcast
        self.receiver, self._offload, self._limit = receiver, offload, limit
        serve_requests(transport, FETCH, self.answer, limit=WANT_NBYTES)

    async def fetch(self, wanted: Fetch, round_: int) -> None:
        """What is coming already is waited for: asked for again, it would come twice and each time slower."""
        with self.arrivals.fetch(wanted.frame) as fresh:
            for holder in thin_last(wanted.holders, self.broadcast.lines_of(wanted.holders)) if fresh else ():
                await self.arrivals.pushed(wanted.owner)
                if wanted.frame in self.store:
                    return
                if holder == wanted.owner and self.arrivals.is_pushing(holder):
                    continue  # it stands still for now, and would come twice by the same way
                if await self.ask(holder, wanted.frame, wanted.owner, round_):
                    return

    async def ask(self, holder: PeerId, frame: bytes, owner: PeerId, round_: int) -> bool:
        """Get a frame from one holder: all of it if what came in pieces was forged. Whether it had it."""
        came = self.broadcast.part(round_, owner)
        for part in (NOTHING_CAME,) if came is None else (came, NOTHING_CAME):
            answer = await fetch(self.transport, holder, Want(frame, part.missing), self._limit)
            if answer is None:
                return False
            if (whole := await self._offload(part.filled, answer, frame)) is not None:
                await self.receiver.take(whole, frame)
                self.broadcast.fetched(whole, owner)
                return True
        return False

    async def answer(self, peer: PeerId, data: bytes) -> bytes:
        """What ``peer`` is given of the frame that it asks for; nothing while that comes to it anyway."""
        want = read_want(data)
        frame = self.store.get(want.frame)
        if frame is None or self.broadcast.comes_to(peer, frame.hash):
            return b""
        return want.of(frame.data)
