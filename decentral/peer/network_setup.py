"""How a peer goes on the network: whether it can be dialled, through which relays otherwise, and so in which role.

Public peers relay for others from the start; private ones keep places at the relays they know and hold no directory
keys. Asked before the transport starts, because the daemon takes its role on its command line.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio

from decentral.errors import DecentralError, ListenError, PayloadError, UsageError, first_of
from decentral.swarm.invite import reach
from decentral.transport import Transport
from decentral.transport.base import check_listen, everywhere, pin_ports
from decentral.transport.choice import Keys, make_transport
from decentral.transport.native.tcp import endpoint
from decentral.transport.reachability import Kind, probe, relays_among
from decentral.wire.keys import peer_from_name

logger = logging.getLogger("decentral.peer")

_PATIENCE = 8.0  # s for a relay to be dialled: a person hears of one that does not answer within 20
_AGAIN, _LOOK_EVERY = 5.0, 30.0  # s until all are dialled again, while one is silent and while none is


class RelayWatch:
    """The relays of a peer, dialled again and again; ``silent`` names those that do not answer, as HOST:PORT."""

    def __init__(self, relays: Sequence[str] = ()) -> None:
        self._relays = relays
        self.silent: tuple[str, ...] = ()

    async def run(self, transport: Transport) -> None:
        """Look on until cancelled, and log when one falls silent or answers."""
        while self._relays:
            silent = dict[str, bool]()
            async with anyio.create_task_group() as group:
                for relay in self._relays:
                    group.start_soon(self._dial, transport, relay, silent)
            now = tuple(sorted(place for place, is_silent in silent.items() if is_silent))
            for place in filter(lambda place: place not in self.silent, now):
                whom = reach(transport.addresses())
                logger.warning("relay %s does not answer, looking on; the invite reaches: %s", place, whom)
            for place in filter(lambda place: place not in now, self.silent):
                logger.info("relay %s answers", place, extra={"plain": True})
            self.silent = now
            await anyio.sleep(_AGAIN if now else _LOOK_EVERY)

    async def _dial(self, transport: Transport, relay: str, silent: dict[str, bool]) -> None:
        where, _, name = relay.rpartition("/p2p/")
        host, port = endpoint(where) or ("", 0)
        silent[f"{host}:{port}"] = True
        with anyio.move_on_after(_PATIENCE):
            with suppress(DecentralError, OSError):
                await transport.connect(peer_from_name(name), (relay,))
                silent[f"{host}:{port}"] = False


@dataclass(frozen=True, slots=True)
class NetworkSetup:
    """The transport, not yet started, and what was found out for it."""

    transport: Transport
    kind: Kind = "unknown"
    relays: tuple[str, ...] = ()  # where it keeps places
    listen: tuple[str, ...] = ()  # on which it listens, with their ports; none where the transport was given
    watch: RelayWatch = field(default_factory=RelayWatch)  # of those, and of all that were asked for

    @property
    def is_private(self) -> bool:
        """True where it is known that others cannot dial this machine."""
        return self.kind in ("nat", "symmetric nat", "firewall")


def check_relays(relays: Sequence[str]) -> None:
    """UsageError for what is no address of a relay."""
    for address in relays:
        where, _, name = address.rpartition("/p2p/")
        try:
            peer_from_name(name)
            direct = endpoint(where) is not None
        except PayloadError:
            direct = False
        if not direct:
            raise UsageError(f"relay {address!r}: want /ip4/HOST/tcp/PORT/p2p/NAME, as decentral relay prints it")


def enter(
    asked: Transport | str | None,
    keys: Keys,
    listen: Sequence[str] | None,
    *,
    relays: Sequence[str] = (),
    invited_by: Sequence[str] = (),
    before: Sequence[str] = (),
) -> NetworkSetup:
    """Ask the relays and who invited this peer whether it can be dialled, then make its transport.

    Where ``listen`` leaves the port open, it is that of ``before``, on which the last process listened, if it is free:
    others look for this peer there. Takes milliseconds where somebody can dial it, 3 s behind a NAT. Raises
    ListenError, UsageError.
    """
    if asked is not None and not isinstance(asked, str):
        return NetworkSetup(asked)
    check_relays(relays)
    others = (*relays, *invited_by)
    known = relays_among(others)
    again = pin_ports(everywhere() if listen is None else listen, before)
    if before and _free(again):
        listen = again
    found = run_apart(probe, listen, (*others, *known), time.time)
    chosen = {"public": (), "private": known, None: tuple(relays)}[found.role]
    logger.debug("reachability: %s, seen by %s", found.kind, found.views)
    where = found.listen if _free(found.listen) else listen
    transport = make_transport(asked, keys, where, role=found.role, relays=chosen)
    watch = RelayWatch(tuple(dict.fromkeys((*relays, *chosen))))
    return NetworkSetup(transport, found.kind, chosen, tuple(where or ()), watch)


def _free(listen: Sequence[str]) -> bool:
    try:
        check_listen(listen)
    except ListenError:
        return False
    return True


# ---- coroutines from synchronous code ----
#
# Also where an event loop runs in this thread already, as it does in a notebook.

T = TypeVar("T")


def run_apart(work: Callable[..., Awaitable[T]], *args: Any) -> T:
    """``work(*args)`` on a loop of its own: here, or on a thread where this one's is taken.

    An error in a task group comes as it was raised: of a group, a SystemExit of a handler of signals was status 1.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run(work, *args)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: _run(work, *args)).result()


def _run(work: Callable[..., Awaitable[T]], *args: Any) -> T:
    try:
        return anyio.run(work, *args)
    except BaseExceptionGroup as group:
        raise first_of(group) from None
