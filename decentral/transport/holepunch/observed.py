"""What a relay says that this peer looks like from outside: the address that another one behind a NAT would dial.

Asked once per connection to a relay, over identify; one answer holds as long as the connection, which keeps the NAT's
mapping open. Nothing of it is told to others but those that want to punch.
"""

from __future__ import annotations

import anyio

from decentral.errors import DecentralError
from decentral.transport.holepunch.dcutr import plausible
from decentral.transport.native.ports import Ports
from decentral.transport.native.sessions import Sessions
from decentral.transport.native.stream import NativeStream
from decentral.transport.native.tcp import SocketEnds
from decentral.transport.protocols.identify import ask
from decentral.transport.protocols.yamux import Session
from decentral.wire.keys import PeerId

_MOST = 64  # relays that are remembered


class Observed:
    """This peer as relays see it."""

    def __init__(self, sessions: Sessions, ports: Ports, timeout: float) -> None:
        self._sessions, self._ports, self._timeout = sessions, ports, timeout
        self._known: dict[PeerId, tuple[Session, str | None]] = {}

    async def at(self, relay: PeerId) -> tuple[str, ...]:
        """Where the listening port can be dialled, as the relay sees it: one address, or none when it cannot tell."""
        session = self._sessions.standing(relay)
        if session is None:
            return ()
        known = self._known.get(relay)
        if known is None or known[0] is not session:
            known = session, await self._asked(session)
            self._remember(relay, known)
        return (known[1],) if known[1] else ()

    async def _asked(self, session: Session) -> str | None:
        stream = NativeStream(session.peer, session.open())
        try:
            with anyio.fail_after(self._timeout):
                told = await ask(stream)
        except (DecentralError, TimeoutError):
            return None
        finally:
            stream.reset()
        return self._reachable_at(told.observed or "", self._sessions.ends(session))

    def _reachable_at(self, seen: str, ends: SocketEnds) -> str | None:
        """``seen`` with the port that is listened on. None: not plausible, or no way to tell which port that is."""
        found, own = plausible([seen], ends.host), self._ports.own_end(ends.host or "")
        if not found or own is None:
            return None
        host, port = found[0]
        if ends.local_port != own[1]:
            if port != ends.local_port:
                return None  # this NAT gives every connection another port
            port = own[1]  # it kept the port of this connection, so it will keep that one
        return f"/ip{6 if ':' in host else 4}/{host}/tcp/{port}"

    def _remember(self, relay: PeerId, known: tuple[Session, str | None]) -> None:
        self._known.pop(relay, None)
        if len(self._known) >= _MOST:
            del self._known[next(iter(self._known))]
        self._known[relay] = known
