"""Places kept at relays, so that peers behind a NAT can be dialled: asked for, renewed, and asked for again when lost.

A relay that lets a connection carry less than one large frame is passed over: rounds would break off in the middle.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import anyio

from decentral.errors import ConfigError, DecentralError, TransportError
from decentral.transport.native.dialling import Dialler
from decentral.transport.native.sessions import Sessions
from decentral.transport.native.tcp import endpoint
from decentral.transport.protocols.messages import propose
from decentral.transport.protocols.yamux import NativeStream
from decentral.transport.relay.circuit import HOP, LEAST_NBYTES, Reservation, reserve
from decentral.wire.keys import PeerId, peer_from_name, peer_name

logger = logging.getLogger("decentral.transport")

_SHORTEST, _LONGEST = 15.0, 1800.0  # s between renewals: half of what was granted, by a clock that may be wrong
_LOOK = 1.0  # s between looks whether the relay is still there
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # s between attempts


class Places:
    """The relays that this peer can be reached through."""

    def __init__(self, sessions: Sessions, dialler: Dialler, relays: Sequence[str], timeout: float) -> None:
        self.relays = {_relay_at(address): address for address in relays}
        self._sessions, self._dialler, self._timeout = sessions, dialler, timeout
        self._kept: dict[PeerId, str] = {}

    def addresses(self) -> tuple[str, ...]:
        """Where this peer can be dialled, without its own ``/p2p/<name>``."""
        return tuple(f"{where}/p2p-circuit" for where in tuple(self._kept.values()))

    async def keep(self, relay: PeerId) -> None:
        """Hold a place at one relay until cancelled."""
        pause = _FIRST_PAUSE
        while True:
            try:
                place = await self._reserved(relay)
                self._kept[relay], pause = self.relays[relay], _FIRST_PAUSE
                await self._while_it_lasts(relay, place)
            except (DecentralError, TimeoutError) as error:
                logger.warning("no place at relay %s, next try in %.0f s: %s", peer_name(relay), pause, error)
                self._kept.pop(relay, None)
                await anyio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    async def _reserved(self, relay: PeerId) -> Reservation:
        place = await ask_place(self._dialler, relay, (self.relays[relay],), self._timeout)
        if too_little(place):
            raise TransportError(
                f"it carries {place.nbytes} bytes a connection, {LEAST_NBYTES} are needed; use another relay"
            )
        return place

    async def _while_it_lasts(self, relay: PeerId, place: Reservation) -> None:
        """Until it is time to renew, or the connection is gone and the place with it."""
        lasts = min(max((place.expires - time.time()) / 2, _SHORTEST), _LONGEST)
        with anyio.move_on_after(lasts):
            while self._sessions.has(relay):
                await anyio.sleep(_LOOK)
            self._kept.pop(relay, None)


async def ask_place(dialler: Dialler, relay: PeerId, where: Sequence[str], timeout: float) -> Reservation:
    """A place at the relay at ``where``. TransportError when it gives none, TimeoutError when it says nothing."""
    await dialler.connect(relay, where)
    stream = NativeStream(relay, (await dialler.session(relay)).open())
    try:
        with anyio.fail_after(timeout):
            await propose(stream, HOP)
            return await reserve(stream)
    finally:
        stream.reset()


def too_little(place: Reservation) -> bool:
    """Whether one frame may not pass: relays of the public network grant 128 KiB a connection, ours 4 GiB."""
    return place.nbytes is not None and place.nbytes < LEAST_NBYTES


def _relay_at(address: str) -> PeerId:
    where, _, name = address.rpartition("/p2p/")
    if endpoint(where) is None:
        raise ConfigError(f"relay {address!r}: want /ip4/HOST/tcp/PORT/p2p/NAME, as the relay prints it")
    return peer_from_name(name)
