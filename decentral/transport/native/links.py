"""A transport's connections to peers, and what makes them: sockets become sessions by handshakes, dialled or accepted.

``sessions`` knows what stands, ``handshakes`` let strangers become sessions, ``dialler`` goes out to peers, and all
leave from the ``ports`` that are listened on.
"""

from __future__ import annotations

import anyio

from decentral.transport.native.dialling import Dialler
from decentral.transport.native.handshakes import Handshakes
from decentral.transport.native.ports import Ports
from decentral.transport.native.sessions import SessionEvents, Sessions
from decentral.transport.relay.limits import RelayLimits
from decentral.wire.keys import Signer


class Links:
    """The parts, put together. ``limits``: those of a relay, which has strangers for guests; None for a peer."""

    def __init__(
        self, signer: Signer, timeout: float, events: SessionEvents, limits: RelayLimits | None = None
    ) -> None:
        self.ports = Ports()
        if limits is None:
            self.sessions = Sessions(events)
            self.handshakes = Handshakes(signer, timeout, self.sessions)
        else:
            self.sessions = Sessions(events, connections=limits.peers, stock=limits.windows)
            self.handshakes = Handshakes(signer, timeout, self.sessions, of_one_network=limits.peers_per_network)
        self.dialler = Dialler(signer.peer, timeout, self.ports, self.sessions, self.handshakes)

    async def finish(self, timeout: float) -> None:
        """Let what is queued leave, then end every session; ``timeout`` s at most, twice that with relayed ones."""
        self.handshakes.dismiss()
        with anyio.CancelScope(shield=True):
            await self.sessions.finish(timeout)
