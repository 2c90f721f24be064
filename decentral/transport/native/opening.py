"""A stream for one protocol to a peer: over the connection there is, or over a new one when that is found dead."""

from __future__ import annotations

import anyio

from decentral.errors import DecentralError, PeerUnreachable, StreamClosed
from decentral.transport.base import Traffic
from decentral.transport.native.dialling import Dialler
from decentral.transport.native.sessions import Sessions
from decentral.transport.native.stream import NativeStream
from decentral.transport.protocols.multistream import propose
from decentral.wire.keys import PeerId, peer_name


class Opener:
    """Opens the streams of one transport, and counts what they carry in ``traffic``."""

    def __init__(self, dialler: Dialler, sessions: Sessions, traffic: Traffic, timeout: float) -> None:
        self._dialler, self._sessions, self._traffic, self._timeout = dialler, sessions, traffic, timeout

    async def open(self, peer: PeerId, protocol: str) -> NativeStream:
        """See Transport."""
        fresh = not self._sessions.has(peer)
        try:
            return await self._open(peer, protocol)
        except StreamClosed as error:
            if fresh:
                raise unreachable(peer, error) from None
        try:  # the connection was dying when it was asked
            return await self._open(peer, protocol)
        except StreamClosed as error:
            raise unreachable(peer, error) from None

    async def _open(self, peer: PeerId, protocol: str) -> NativeStream:
        session = await self._dialler.session(peer)
        stream = NativeStream(peer, session.open())
        proposed = False
        try:
            with anyio.fail_after(self._timeout):
                await propose(stream, protocol)
            proposed = True
        except TimeoutError:
            raise PeerUnreachable(f"{peer_name(peer)}: {protocol} was not answered in time; try again") from None
        except PeerUnreachable as error:
            raise PeerUnreachable(f"{peer_name(peer)}: {error}") from None
        except StreamClosed:
            raise
        except DecentralError as error:
            raise unreachable(peer, error) from None
        finally:
            if not proposed:
                stream.reset()
        stream.traffic = self._traffic
        return stream


def unreachable(peer: PeerId, error: DecentralError) -> PeerUnreachable:
    """That there is no path, and why."""
    return PeerUnreachable(f"{peer_name(peer)}: no path to it now: {error}; try again or ask another peer")
