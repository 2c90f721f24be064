"""Frames that did not come are asked of their holders, and those held here are given to who asks.

Of what came in pieces only the rest is asked for. Who is sending a frame in pieces sends it to nobody a second time:
four who each lacked some of a thin peer's frame had all of it once more, one of eight on 2 Mbit/s, and the round took
94 s.
"""

from __future__ import annotations

from decentral.consensus.round_state import Fetch
from decentral.dissemination import gather
from decentral.dissemination.arrivals import Arrivals
from decentral.dissemination.broadcast import ChunkedBroadcast, Receiver
from decentral.dissemination.partial_frame import NOTHING
from decentral.dissemination.spread import thin_last
from decentral.dissemination.store import FrameStore
from decentral.flow.offload import Offload
from decentral.transport import Transport
from decentral.transport.requests import serve_requests
from decentral.wire.keys import PeerId
from decentral.wire.pieces import WANT_NBYTES, Want, read_want


class FrameFetcher:
    """One peer's part in it."""

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
        serve_requests(transport, gather.FETCH, self.answer, limit=WANT_NBYTES)

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
        for part in (NOTHING,) if came is None else (came, NOTHING):
            answer = await gather.fetch(self.transport, holder, Want(frame, part.missing), self._limit)
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
