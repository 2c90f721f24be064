"""What a daemon does not say of its relays, found out by asking them with a transport of our own.

go-libp2p names no place at a relay on loopback or a private network, and does not tell what a relay grants.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from decentral.errors import TransportError
from decentral.transport.native.transport import NativeOptions, NativeTransport
from decentral.transport.relay.reservations import too_little
from decentral.wire.keys import PeerId, Signer, peer_name

_NOWHERE = ("/ip4/127.0.0.1/tcp/0",)  # nobody is to dial a peer that only asks
_PATIENCE = 5.0  # s for a relay to be dialled and to answer; one grants a place within milliseconds


async def unnamed_places(me: PeerId, relays: Sequence[str]) -> tuple[str, ...]:
    """Where ``me`` is reached through those relays, whatever its daemon says."""
    reached = []
    options = NativeOptions(dial_timeout=_PATIENCE, punch=False)
    async with NativeTransport(Signer.generate(), listen=_NOWHERE, options=options) as asking:
        for place in (f"{relay}/p2p-circuit" for relay in relays):
            with suppress(TransportError, TimeoutError):
                await asking.connect(me, [f"{place}/p2p/{peer_name(me)}"])
                reached.append(place)
    return tuple(reached)


async def grants_little(relay: PeerId, addresses: Sequence[str]) -> bool:
    """Whether the relay at ``addresses`` carries less than a large frame.

    A daemon that is told it is public still starts with the limits of a private one now and then, 128 KiB and 2 min
    (measured: 1 of 6 starts on loopback, more in the network lab), and keeps them; peers that take a place there are
    cut off in the middle of frames.
    """
    signer = Signer.generate()
    async with NativeTransport(signer, listen=_NOWHERE, options=NativeOptions(dial_timeout=_PATIENCE)) as asking:
        try:
            return too_little(await asking.granted(relay, addresses))
        except (TransportError, TimeoutError):
            return False  # it gives no place at all: nothing that another start would mend
