"""Multicast DNS on the networks of this machine: says a record of ours, hands on what others say. For asyncio only.

Crosses the wire: three packets of about 1 kB when it begins and when it ends, one for each question of others, and a
few questions of ours. IPv4's group only; what is announced may be IPv6. The library keeps at most 10,000 records.

Source: RFC 6762 and 6763 through python-zeroconf (LGPL-2.1-or-later).
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import anyio
from zeroconf import RecordUpdate, RecordUpdateListener, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from decentral.errors import ListenError
from decentral.swarm.announcement import LONGEST, SERVICE

_GROUP, _PORT = "224.0.0.251", 5353
_PARTING = 1.0  # s for three goodbyes, 125 ms apart

Hear = Callable[[bytes], None]


def usable_hosts(hosts: Sequence[str]) -> list[str]:
    """Return this machine's IPv4 addresses where multicast can be heard. ListenError where there is none.

    Asked of a socket of ours first: the library leaves its own ones open when it fails half way.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for option in ("SO_REUSEADDR", "SO_REUSEPORT"):
                if hasattr(socket, option):
                    probe.setsockopt(socket.SOL_SOCKET, getattr(socket, option), 1)
            probe.bind(("", _PORT))
            found = [host for host in hosts if ":" not in host and _joins(probe, host)]
    except OSError as error:
        why = f"UDP port {_PORT} cannot be shared ({error.strerror})"
        raise ListenError(f"multicast DNS: {why}; others are met by their invite only") from None
    if not found:
        raise ListenError("multicast DNS: no network of this machine takes part; others are met by their invite only")
    return found


def _joins(probe: socket.socket, host: str) -> bool:
    try:
        membership = socket.inet_aton(_GROUP) + socket.inet_aton(host)
        probe.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
    except OSError:
        return False
    return True


@asynccontextmanager
async def on_air(hosts: Sequence[str], text: bytes | None, port: int, hear: Hear) -> AsyncIterator[None]:
    """Announce ``text`` where it is given, and ``hear`` every record of libp2p nodes, on the networks of ``hosts``."""
    responder = AsyncZeroconf(interfaces=usable_hosts(hosts))
    try:
        await responder.zeroconf.async_wait_for_start()
        responder.zeroconf.async_add_listener(_Ear(hear), None)
        AsyncServiceBrowser(responder.zeroconf, SERVICE, handlers=[_ask_only])
        if text is not None:
            sent = await responder.async_register_service(_service(hosts, text, port), cooperating_responders=True)
            await sent
        yield
    finally:
        with anyio.CancelScope(shield=True), anyio.move_on_after(_PARTING):
            await responder.async_close()


def _service(hosts: Sequence[str], text: bytes, port: int) -> AsyncServiceInfo:
    """Return the service, under a name that is new every time, as the spec has it, which need not be asked for."""
    name = secrets.token_hex(16)
    return AsyncServiceInfo(
        SERVICE,
        f"{name}.{SERVICE}",
        port=port,
        properties=text,
        server=f"{name}.local.",
        parsed_addresses=[host for host in hosts if ":" not in host],
    )


class _Ear(RecordUpdateListener):
    """Hands on records as they come; it must not raise, because the library's own work would end with it."""

    def __init__(self, hear: Hear) -> None:
        super().__init__()
        self._hear = hear

    def async_update_records(self, zc: Zeroconf, now: float, records: list[RecordUpdate]) -> None:
        """Hand on what records say. A record that is taken back is not heard: anybody could say that, too."""
        for update in records:
            record, text = update.new, getattr(update.new, "text", None)  # only a TXT record has one
            if not isinstance(text, bytes) or not record.name.lower().endswith(SERVICE):
                continue
            if len(text) <= LONGEST and not record.is_expired(now):
                self._hear(text)


def _ask_only(zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
    """The browser asks who is there; the answers are heard by ``_Ear``, without a question for each name."""
