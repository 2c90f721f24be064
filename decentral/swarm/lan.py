"""Peers of one run that find each other on the local network, also when the invite's addresses are stale or there is no
internet.

Each announces itself by multicast DNS, and looks where others of its run say that they are. It helps or it does not:
without multicast, or when the library fails, the peer runs on, and one event says so.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import anyio

from decentral.errors import PayloadError
from decentral.swarm.announcement import Sighting, host_of, local_addresses, read_announcement, write_announcement
from decentral.swarm.directory import Directory
from decentral.transport.native.tcp import endpoint
from decentral.wire.keys import PeerId, peer_name

logger = logging.getLogger("decentral.swarm")

_LOOK_EVERY = 0.25  # s between two looks at what was heard
_HEARD = 64  # records between two looks; of more, the newest count
_MOVED_EVERY = 5.0  # s between two looks at this machine's own addresses
_AGAIN = 30.0  # s until the next try after a failure

Event = Callable[[str, dict[str, object]], None]
OnAir = Callable[[Sequence[str], bytes | None, int, Callable[[bytes], None]], AbstractAsyncContextManager[Any]]


def _on_air(
    hosts: Sequence[str], text: bytes | None, port: int, hear: Callable[[bytes], None]
) -> AbstractAsyncContextManager[None]:
    from decentral.swarm.mdns import on_air  # here: a peer without a local network never loads the library

    return on_air(hosts, text, port, hear)


class Lan:
    """The place of one peer on its networks. ``announce=False``: it asks and listens only, as a first call does."""

    def __init__(self, on_event: Event, *, announce: bool = True, on_air: OnAir = _on_air) -> None:
        self._on_event, self._announce, self._on_air = on_event, announce, on_air
        self._said: dict[str, object] | None = None

    async def run(self, directory: Directory) -> None:
        """Announce, listen and look, until cancelled. While the directory runs; never raises."""
        heard: deque[bytes] = deque(maxlen=_HEARD)
        async with anyio.create_task_group() as group:
            group.start_soon(self._look_forever, directory, heard)
            while True:
                pause = await self._be_there(directory, heard.append)
                await anyio.sleep(pause)

    async def _be_there(self, directory: Directory, hear: Callable[[bytes], None]) -> float:
        """Be there until the addresses of this machine change, or it fails; returns how long to wait before the next
        try.
        """
        addresses = local_addresses(directory.transport.addresses())
        hosts = list(dict.fromkeys(map(host_of, addresses)))
        if not addresses:
            self._say({"off": "this peer listens on no private network"})
            return _MOVED_EVERY
        text = write_announcement(directory.run_digest, directory.peer, addresses) if self._announce else None
        port = (endpoint(addresses[0]) or ("", 0))[1]
        try:
            async with self._on_air(hosts, text, port, hear):
                self._say({"on": hosts})
                while local_addresses(directory.transport.addresses()) == addresses:
                    await anyio.sleep(_MOVED_EVERY)
        except Exception as error:  # whatever the library meets out there, training goes on
            logger.debug("local network", exc_info=True)
            self._say({"off": str(error) or type(error).__name__})
            return _AGAIN
        return 0.0

    async def _look_forever(self, directory: Directory, heard: deque[bytes]) -> None:
        neighbours = Neighbours(directory.peer)
        while True:
            while heard:
                self._take(heard.popleft(), directory, neighbours)
            live = directory.live()
            for peer, addresses in neighbours.due(anyio.current_time(), live):
                directory.look_for(peer, addresses)
            for peer in neighbours.met(live):
                self._on_event("lan_met", {"peer": peer_name(peer)})
            await anyio.sleep(_LOOK_EVERY)

    def _take(self, text: bytes, directory: Directory, neighbours: Neighbours) -> None:
        try:
            sighting = read_announcement(text, directory.run_digest)
        except PayloadError as error:
            logger.debug("%s", error)
            return
        if sighting is not None:
            neighbours.heard(sighting, anyio.current_time())

    def _say(self, what: dict[str, object]) -> None:
        """Say it once for each change: a network that is down for a night is one line."""
        if what != self._said:
            self._said = what
            self._on_event("lan", what)


# ---- who was said to be near ----
#
# When each of them is worth a look. Pure: the time comes in.
#
# Anybody on the network can say anything about anybody, so what is said is a reason to look and nothing more: at most
# 32 peers are remembered, the one heard longest ago is forgotten first, and at most 8 looks begin at a time, at each
# peer with growing pauses. A flood of names can hide neighbours; it can hold no memory and causes at most 32 dials a
# second.

MOST = 32  # peers
AT_ONCE = 8  # looks
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # s between two looks at one peer
FORGOTTEN = 4500.0  # s without a word: how long a TXT record counts (RFC 6762, 10)


@dataclass(slots=True)
class Neighbour:
    """A peer, as it was announced last."""

    addresses: tuple[str, ...]
    heard: float
    look_at: float  # the next time
    pause: float = FIRST_PAUSE
    tried: bool = False


class Neighbours:
    """The peers of one run that are said to be near."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._known: dict[PeerId, Neighbour] = {}  # heard longest ago first

    def __len__(self) -> int:
        return len(self._known)

    def heard(self, sighting: Sighting, now: float) -> None:
        """Note where somebody says that a peer is."""
        if sighting.peer == self._me:
            return
        known = self._known.pop(sighting.peer, None)
        if known is None and len(self._known) >= MOST:
            del self._known[next(iter(self._known))]
        if known is None:
            known = Neighbour(sighting.addresses, now, look_at=now)
        elif known.addresses != sighting.addresses:
            known.addresses, known.pause = sighting.addresses, FIRST_PAUSE
            known.look_at = min(known.look_at, now + FIRST_PAUSE)
        known.heard = now
        self._known[sighting.peer] = known

    def due(self, now: float, here: Container[PeerId]) -> list[tuple[PeerId, tuple[str, ...]]]:
        """Return the peers to look for now, and where; nobody who is ``here`` already."""
        for peer in [peer for peer, one in self._known.items() if now - one.heard > FORGOTTEN]:
            del self._known[peer]
        chosen = [(peer, one) for peer, one in self._known.items() if one.look_at <= now and peer not in here]
        for _, one in chosen[:AT_ONCE]:
            one.look_at, one.pause, one.tried = now + one.pause, min(2 * one.pause, LONGEST_PAUSE), True
        return [(peer, one.addresses) for peer, one in chosen[:AT_ONCE]]

    def met(self, here: Container[PeerId]) -> list[PeerId]:
        """Return the peers that are here since they were looked for; each is named once, and looked for soon when it is
        gone.
        """
        found = [peer for peer, one in self._known.items() if one.tried and peer in here]
        for peer in found:
            self._known[peer].tried, self._known[peer].pause = False, FIRST_PAUSE
        return found
