"""The reachability of this machine before its transport starts: dialled by anybody, behind a NAT, or nobody could say.

It is found out by asking, over connections of a throw-away identity and with the port open that will be used, so that
the daemon starts in the role it has: left to find out for itself it takes a place at a relay after about 16 s. The
relays of a running daemon are asked the same way, for what it does not say of them.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import anyio

from decentral.errors import DecentralError, PayloadError, TransportError
from decentral.transport.base import everywhere, pin_ports
from decentral.transport.native.dialling import too_little
from decentral.transport.native.tcp import endpoint
from decentral.transport.native.transport import NativeOptions, NativeTransport
from decentral.transport.paths import ANSWERED, NOT_TRIED, ask_dialback
from decentral.transport.protocols.circuit import relay_of
from decentral.wire.keys import PeerId, Signer, peer_from_name, peer_name

Kind = Literal["public", "nat", "symmetric nat", "firewall", "local", "unknown"]
MAX_RELAYS = 4  # that a private peer keeps places at
_ASKED = 4  # third parties
_PATIENCE = 8.0  # s for all of them together: an answer takes 3 s where the port is filtered


@dataclass(frozen=True, slots=True)
class View:
    """A view of this machine from one third party."""

    peer: PeerId
    seen: str  # this machine's end of the connection, from there
    local_port: int  # the same end, from here
    answered: bool | None  # whether this machine could be dialled from there; None: it was not tried
    skew: float  # s that its clock is ahead of ours, give or take the delay of the path


@dataclass(frozen=True, slots=True)
class Reachability:
    """The verdict, and what it rests on. ``listen`` has the ports that were tried, to be listened on."""

    kind: Kind
    listen: tuple[str, ...]
    views: tuple[View, ...] = ()

    @property
    def role(self) -> Literal["public", "private"] | None:
        """The role that the transport is told; None: it may find out by itself."""
        if self.kind == "public":
            return "public"
        return None if self.kind in ("local", "unknown") else "private"


async def probe(listen: Sequence[str] | None, others: Iterable[str], clock: Callable[[], float]) -> Reachability:
    """Ask the peers at ``others`` (multiaddrs with ``/p2p/``) to dial back. Raises ListenError, ConfigError."""
    wanted = tuple(listen) if listen is not None else everywhere()
    views: list[View] = []
    # Not from the port in question: the way back would be open to whoever is asked, and to nobody else.
    options = NativeOptions(dial_timeout=_PATIENCE / 2, punch=False)
    async with NativeTransport(Signer.generate(), listen=wanted, options=options) as transport:
        bound = [address.partition("/p2p/")[0] for address in transport.links.bound]
        own = {_host(address) for address in bound}
        port = next((end[1] for end in map(endpoint, bound) if end), 0)
        with anyio.move_on_after(_PATIENCE):
            async with anyio.create_task_group() as group:
                for peer, theirs in list(_by_peer(others).items())[:_ASKED]:
                    group.start_soon(_ask, transport, peer, theirs, port, clock, views)
    return Reachability(verdict(views, own), pin_ports(wanted, bound), tuple(views))


def verdict(views: Sequence[View], own: set[str]) -> Kind:
    """Return what the views say together; ``own`` are the hosts of this machine's interfaces.

    Who answers to a caller of its own network only is not public. A NAT that shows two callers the port that the
    connection left from keeps it, and can be punched; one that shows another is taken for symmetric.
    """
    outside = [view for view in views if _is_global(view.seen)]
    if any(view.answered for view in outside):
        return "public"
    tried = [view for view in outside if view.answered is not None]
    if not tried:
        return "local" if any(view.answered for view in views) else _by_interfaces(own)
    if all(_host(view.seen) in own for view in tried):
        return "firewall"
    kept = all((endpoint(view.seen) or ("", 0))[1] == view.local_port for view in tried)
    return "nat" if kept else "symmetric nat"


def relays_among(addresses: Iterable[str]) -> tuple[str, ...]:
    """Return an address of each relay that leads to a peer at ``addresses``, then of each peer reached directly."""
    found: dict[PeerId, str] = {}
    given = list(addresses)
    for address in given:
        relay = relay_of(address)
        if relay is not None:
            found.setdefault(*relay)
    for peer, theirs in _by_peer(given).items():
        found.setdefault(peer, theirs[0])
    return tuple(found.values())[:MAX_RELAYS]


async def _ask(
    transport: NativeTransport,
    peer: PeerId,
    theirs: tuple[str, ...],
    port: int,
    clock: Callable[[], float],
    views: list[View],
) -> None:
    try:
        await transport.connect(peer, theirs)
        local = transport.links.sessions.local_port(peer)
        answer = await ask_dialback(transport, peer, port)
    except DecentralError:
        return  # old, gone, or not reachable from here: the others are asked, too
    answered = None if answer.outcome == NOT_TRIED else answer.outcome == ANSWERED
    views.append(View(peer, answer.seen, local, answered, answer.milliseconds / 1000 - clock()))


def _by_peer(addresses: Iterable[str]) -> dict[PeerId, tuple[str, ...]]:
    """Return the addresses that can be dialled directly, by who is there."""
    found: dict[PeerId, tuple[str, ...]] = {}
    for address in addresses:
        try:
            peer = peer_from_name(address.rpartition("/p2p/")[2])
        except PayloadError:
            continue
        if endpoint(address) is not None:
            found[peer] = (*found.get(peer, ()), address)
    return found


def _by_interfaces(own: set[str]) -> Kind:
    """Judge where nobody could say: a machine with a public address of its own is most likely dialled there."""
    return "public" if any(_is_global(f"/ip4/{host}") for host in own) else "unknown"


def _host(address: str) -> str:
    return address.split("/")[2] if address.count("/") > 1 else ""


def _is_global(address: str) -> bool:
    try:
        return ipaddress.ip_address(_host(address)).is_global
    except ValueError:
        return False


# ---- relays of a daemon, asked by us ----
#
# With a transport of our own, as go-libp2p names no place at a relay on loopback or a private network, and does not
# tell what a relay grants.

_NOWHERE = ("/ip4/127.0.0.1/tcp/0",)  # nobody is to dial a peer that only asks
_PATIENCE_WITH_A_RELAY = 5.0  # s for a relay to be dialled and to answer; one grants a place within milliseconds


async def find_unnamed_places(me: PeerId, relays: Sequence[str]) -> tuple[str, ...]:
    """Return where ``me`` is reached through those relays, whatever its daemon says."""
    reached = []
    options = NativeOptions(dial_timeout=_PATIENCE_WITH_A_RELAY, punch=False)
    async with NativeTransport(Signer.generate(), listen=_NOWHERE, options=options) as asking:
        for place in (f"{relay}/p2p-circuit" for relay in relays):
            with suppress(TransportError, TimeoutError):
                await asking.connect(me, [f"{place}/p2p/{peer_name(me)}"])
                reached.append(place)
    return tuple(reached)


async def grants_little(relay: PeerId, addresses: Sequence[str]) -> bool:
    """Tell whether the relay at ``addresses`` carries less than a large frame.

    A daemon that is told it is public still starts with the limits of a private one now and then, 128 KiB and 2 min
    (measured: 1 of 6 starts on loopback, more in the network lab), and keeps them; peers that take a place there are
    cut off in the middle of frames.
    """
    signer = Signer.generate()
    async with NativeTransport(
        signer, listen=_NOWHERE, options=NativeOptions(dial_timeout=_PATIENCE_WITH_A_RELAY)
    ) as asking:
        try:
            return too_little(await asking.links.places.ask(relay, addresses))
        except (TransportError, TimeoutError):
            return False  # it gives no place at all: nothing that another start would mend
