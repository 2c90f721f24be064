"""What is on its way to this peer already, so that no frame takes its downlink, and somebody's uplink, twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio

from decentral.wire.keys import PeerId

# s without a byte after which a push is not counted on. A lost packet costs TCP about one; but the daemon's streams
# move in steps of 460 kB, seven at once on 20 Mbit/s every 1.3 s: with a limit of 2 s a busy machine sent twice
PAUSE = 5.0

Digest = bytes


class Push:
    """One frame that a peer is sending here."""

    def __init__(self) -> None:
        self.moved_at = anyio.current_time()
        self.ended = anyio.Event()

    @property
    def stands_still_at(self) -> float:
        """When it is not counted on any more. One expression: another may round to a time that never comes."""
        return self.moved_at + PAUSE

    def on_bytes(self, count: int) -> None:
        """``count`` bytes came."""
        self.moved_at = anyio.current_time()


class Arrivals:
    """Pushes to this peer, and the frames that it fetches."""

    def __init__(self) -> None:
        self._pushes: dict[PeerId, list[Push]] = {}
        self._pieces: dict[PeerId, Push] = {}
        self._fetched: set[Digest] = set()

    @contextmanager
    def push(self, peer: PeerId) -> Iterator[Callable[[int], None]]:
        """While a frame of ``peer`` comes and is checked; to be told of its bytes."""
        push = Push()
        pushes = self._pushes.setdefault(peer, [])
        pushes.append(push)
        try:
            yield push.on_bytes
        finally:
            push.ended.set()
            pushes.remove(push)
            if not pushes:
                self._pushes.pop(peer, None)

    def piece(self, owner: PeerId) -> None:
        """A piece of a frame of ``owner`` came, from whomever."""
        self._pieces.setdefault(owner, Push()).on_bytes(0)

    def whole(self, owner: PeerId) -> None:
        """The last one did, and the frame is kept."""
        if owner in self._pieces:
            self._pieces.pop(owner).ended.set()

    @contextmanager
    def fetch(self, frame: Digest) -> Iterator[bool]:
        """While ``frame`` is fetched; yields False when it is already."""
        fresh = frame not in self._fetched
        self._fetched.add(frame)
        try:
            yield fresh
        finally:
            if fresh:
                self._fetched.discard(frame)

    def is_pushing(self, peer: PeerId) -> bool:
        """Whether a push of ``peer`` has begun and not ended, moving or not."""
        return peer in self._pushes

    def is_moving(self, peer: PeerId) -> bool:
        """Whether bytes of a push of ``peer`` come."""
        return self._moving(peer) is not None

    async def pushed(self, peer: PeerId) -> None:
        """Wait while bytes of a push of ``peer`` come: which frame it is will be known when all of it is there."""
        while push := self._moving(peer):
            with anyio.CancelScope(deadline=push.stands_still_at):
                await push.ended.wait()

    def _moving(self, peer: PeerId) -> Push | None:
        now, pieces = anyio.current_time(), self._pieces.get(peer)
        pushes = [*self._pushes.get(peer, ()), *([] if pieces is None else [pieces])]
        return next((push for push in pushes if now < push.stands_still_at), None)
