"""How each peer is reached, and how much of what was exchanged with it went through relays.

The transport knows its connections and counts bytes by peer, not both together; looked at every few seconds, and when a
way is wanted that nobody has looked at yet, what was exchanged since the last look went the way that is there now.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import anyio

from decentral.errors import TransportError
from decentral.transport.base import Transport
from decentral.wire.keys import PeerId

LOOK_EVERY = 5.0  # s; one question to the daemon
_CIRCUIT = "/p2p-circuit"


@dataclass(slots=True)
class Path:
    """What is known of the way to one peer."""

    direct: bool  # now
    nbytes: int = 0  # exchanged, both ways, up to the last look
    relayed_nbytes: int = 0  # of those, through a relay

    @property
    def relayed_share(self) -> float:
        """Of what was exchanged with it, the part that went through a relay."""
        return self.relayed_nbytes / self.nbytes if self.nbytes else float(not self.direct)


class Paths:
    """The ways to all peers that this one is connected with, or was."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._known: dict[PeerId, Path] = {}
        self._asked = anyio.Event()

    def get(self, peer: PeerId) -> Path | None:
        """The way to ``peer``; None before there was a connection."""
        return self._known.get(peer)

    def look_soon(self) -> None:
        """Not only when it is time again: somebody wants to know the way to a peer that has just come."""
        self._asked.set()

    async def watch(self) -> None:
        """Look now and then, and when it is asked for, until cancelled."""
        while True:
            with suppress(TransportError):  # the daemon is being started again
                self.look(await self._transport.paths())
            with anyio.move_on_after(LOOK_EVERY):
                await self._asked.wait()
            self._asked = anyio.Event()

    def look(self, connections: dict[PeerId, tuple[str, ...]]) -> None:
        """Book what was exchanged since the last look; a connection without a relay is used where there is one."""
        counted = self._transport.traffic.peers  # bounded, so this is
        for peer, ends in connections.items():
            if peer in self._known or peer in counted:
                direct = any(_CIRCUIT not in end for end in ends)
                self._book(peer, self._known.setdefault(peer, Path(direct)), direct)

    def _book(self, peer: PeerId, path: Path, direct: bool) -> None:
        count = self._transport.traffic.of(peer)
        fresh = count.sent + count.received - path.nbytes
        path.nbytes += fresh
        path.relayed_nbytes += 0 if direct else fresh
        path.direct = direct
