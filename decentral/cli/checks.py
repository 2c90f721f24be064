"""The checks of ``decentral doctor``: each says what it found and, when something is missing, what to do."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import anyio

from decentral.cli.group import one_line
from decentral.errors import DecentralError
from decentral.observe.health import short_name
from decentral.peer.network_setup import check_relays
from decentral.swarm.invite import Invite
from decentral.transport.interfaces import Cards, card_of, cards
from decentral.transport.native.tcp import endpoint
from decentral.transport.native.transport import NativeTransport
from decentral.transport.paths import Speed, measure_speed
from decentral.transport.reachability import Reachability, probe, relays_among
from decentral.wire.keys import Signer, peer_from_name, peer_name

# ---- an answer of a check ----
#
# One line for a person, one object for a program.


@dataclass(frozen=True, slots=True)
class Finding:
    """The finding of one check."""

    verdict: str  # ok, warn, fail
    what: str
    detail: str


# ---- all checks ----

_PACKAGES = ("torch", "hivemind", "accelerate", "transformers")
_LOW_DISK_NBYTES = 2 * 10**9  # three checkpoints of a 100 M parameter model with its optimizer are 3.6 GB
_LOW_MEMORY_NBYTES = 2 * 10**9
_ANSWER_SECONDS = 20.0


def examine(
    directory: Path, invite: str | None, *, listen: tuple[str, ...] = (), relays: tuple[str, ...] = ()
) -> list[Finding]:
    """Run every check; none of them raises."""
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "versions": _versions,
        "machine": _machine,
        "disk": lambda: _disk(directory),
        "listening": lambda: _listening(listen),
        "network": lambda: network(relays),
        "reached": lambda: reachable(listen, relays, invite),
    }
    if invite is not None:
        checks["invite"] = lambda: _reach(invite)
    return [finding for name, check in checks.items() for finding in _guard(name, check)]


def _guard(name: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except DecentralError as error:
        yield Finding("fail", name, one_line(str(error)))
    except Exception as error:  # noqa: BLE001  a doctor reports what is broken, whatever it is
        yield Finding("fail", name, f"{type(error).__name__}: {one_line(str(error))}")


def _versions() -> Iterator[Finding]:
    found = [f"decentral {_version('decentral')}", f"Python {platform.python_version()}"]
    found += [f"{name} {_version(name)}" for name in _PACKAGES if _version(name)]
    yield Finding("ok", "versions", ", ".join(found))
    from decentral.transport.choice import default_kind

    if default_kind() == "daemon":
        yield Finding("ok", "transport", "go-libp2p daemon through hivemind")
    else:
        yield Finding("ok", "transport", "native: libp2p over TCP in this process; there is no hivemind here")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _machine() -> Iterator[Finding]:
    import psutil
    import torch

    cores, memory = os.cpu_count() or 1, psutil.virtual_memory()
    detail = f"{cores} cores, {memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB memory free"
    yield Finding("ok" if memory.available > _LOW_MEMORY_NBYTES else "warn", "machine", detail)
    if torch.cuda.is_available():
        name, total = torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory
        yield Finding("ok", "device", f"{name}, {total / 1e9:.1f} GB")
    else:
        yield Finding("ok", "device", "CPU; no CUDA device is visible to torch")


def _disk(directory: Path) -> Iterator[Finding]:
    place = next((p for p in (directory.absolute(), *directory.absolute().parents) if p.exists()), Path("/"))
    free = shutil.disk_usage(place).free
    if not os.access(place, os.W_OK):
        yield Finding("fail", "disk", f"{place} is not writable; choose another place with --out")
    elif free < _LOW_DISK_NBYTES:
        yield Finding("warn", "disk", f"{free / 1e9:.1f} GB free at {place}; checkpoints need room, free some")
    else:
        yield Finding("ok", "disk", f"{free / 1e9:.1f} GB free at {place}")


def _listening(wanted: tuple[str, ...]) -> Iterator[Finding]:
    """Start the transport with a throw-away identity, list where it can be dialled, end it."""
    from decentral.swarm.identity import Identity
    from decentral.transport.choice import default_kind, make_transport

    async def listen() -> tuple[str, ...]:
        with tempfile.TemporaryDirectory() as folder:
            identity = Identity.load_or_create(Path(folder) / "identity.key")
            async with make_transport(None, identity, wanted or None) as transport:
                return transport.addresses()

    addresses = anyio.run(listen)
    hosts = sorted({address.split("/")[2] for address in addresses})
    yield Finding("ok", default_kind(), f"starts, listens on {', '.join(hosts) or 'nothing'}")
    yield _lan(addresses)


def _lan(addresses: tuple[str, ...]) -> Finding:
    """Check whether peers of one run would meet on this machine's networks without an invite that leads to somebody."""
    from decentral.swarm.announcement import host_of, local_addresses

    hosts = dict.fromkeys(map(host_of, local_addresses(addresses)))
    if not hosts:
        return Finding("ok", "lan", "no private network here; others are met by their invite only")
    from decentral.swarm.mdns import usable_hosts

    try:
        return Finding("ok", "lan", f"peers of one run meet by multicast DNS on {', '.join(usable_hosts([*hosts]))}")
    except DecentralError as error:
        return Finding("warn", "lan", one_line(str(error)))


def _reach(invite: str) -> Iterator[Finding]:
    """Ask a peer of the run for its terms and its model's size, as ``join`` would."""
    import psutil

    from decentral.peer.joining import ask_first_peer

    began = time.monotonic()
    hello = ask_first_peer(Invite.parse(invite), None, _ANSWER_SECONDS)
    seconds, name = time.monotonic() - began, hello.manifest.run.name
    yield Finding("ok", "invite", f"run {name} answered in {seconds:.1f} s; decentral join will work from here")
    yield room_for(hello.schema.sizes, psutil.virtual_memory().available)


def room_for(sizes: Sequence[int], free: int) -> Finding:
    """Say what a run of these fragments takes of so many bytes that are free."""
    from decentral.training.part import find_room

    verdict, sentence = find_room(sizes, free)
    return Finding(verdict, "memory", sentence)


# ---- this machine's network ----
#
# Both kinds of IP, UDP, port mapping, how far relays are.

_ABROAD = {  # set aside for documentation: nobody's
    "ipv4": (socket.AF_INET, "192.0.2.1"),
    "ipv6": (socket.AF_INET6, "2001:db8::1"),
}
_RELAY_SECONDS = 5.0  # for a relay to take a connection

Source = Callable[[socket.AddressFamily, str], str]


def source_of(family: socket.AddressFamily, host: str) -> str:
    """The address that this machine would send to ``host`` from; nothing is sent. OSError when there is no way."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def network(relays: Sequence[str], source: Source = source_of) -> Iterator[Finding]:
    """Lines as network checkers of other tools have them; what this project does not use is said, too."""
    found = {name: _way(source, *where) for name, where in _ABROAD.items()}
    for name, address in found.items():
        other = any(one for kind, one in found.items() if kind != name)
        if address:
            yield Finding("ok", name, f"leaves from {address}")
        elif other:
            yield Finding("ok", name, "no way out; the other kind has one, and peers of this kind alone need a relay")
        else:
            yield Finding(
                "warn", name, "no way out: this machine meets peers of its own network only; check its router"
            )
    yield Finding("ok", "udp", "not used: peers speak TCP, so nothing is to be opened for UDP but mDNS at home (5353)")
    yield Finding(
        "ok",
        "mapping",
        "not asked for: no router is told to open a port (UPnP, NAT-PMP); forward one by hand, or name a relay",
    )
    yield Finding("ok", "hairpin", "not needed: peers behind one router meet by their private addresses")
    for relay in relays:
        yield _distance(relay)


def _way(source: Source, family: socket.AddressFamily, host: str) -> str:
    try:
        return source(family, host)
    except OSError:
        return ""


def _distance(relay: str) -> Finding:
    """Measure the time there and back, by how long TCP takes to connect."""
    at = relay.partition("/p2p/")[0]
    where = endpoint(at)
    if where is None:
        return Finding("warn", "relay", f"{at} cannot be dialled by TCP; ask its operator for a /tcp/ address")
    began = time.monotonic()
    try:
        with socket.create_connection(where, timeout=_RELAY_SECONDS):
            return Finding("ok", "relay", f"{at} answers in {1000 * (time.monotonic() - began):.0f} ms")
    except OSError as error:
        reason = error.strerror or "no answer"
        return Finding("warn", "relay", f"{at} does not answer ({reason}); is it up? Name another one beside it")


# ---- the way to other peers ----
#
# From them: who can dial this machine, how fast it is, and what to do.

_PORT = 4001  # to be opened; what a peer listens on else is another one at each start
_SKEW_SECONDS = 30.0  # nothing here needs clocks to agree; logs are read side by side


def reachable(listen: Sequence[str], relays: Sequence[str], invite: str | None) -> Iterator[Finding]:
    """Ask the run's peers and the relays to dial back, then send one of them something."""
    check_relays(relays)
    others = (*relays, *(Invite.parse(invite).addresses if invite is not None else ()))
    known = relays_among(others)
    found = anyio.run(probe, listen or None, (*others, *known), time.time)
    asked = "the invite's addresses" if invite is not None else "the addresses at --relay" if relays else ""
    yield verdict(found, relays_known=bool(known), asked=asked)
    for view in found.views[:1]:
        behind = "behind" if view.skew > 0 else "ahead of"
        detail = f"{abs(view.skew):.1f} s {behind} {short_name(peer_name(view.peer))}"
        yield Finding("warn" if abs(view.skew) > _SKEW_SECONDS else "ok", "clock", detail)
    for where in known if found.views else ():
        with suppress(DecentralError):  # a relay carries bytes, and measures nothing
            speed = anyio.run(speed_to, where)
            rates = f"{speed.up / 1e6:.1f} Mbit/s up, {speed.down / 1e6:.1f} down"
            yield Finding("ok", "speed", f"at least {rates}, to {_label(where)}")
            break
    if found.views:
        yield from card_findings(ways_to(others))


def verdict(found: Reachability, *, relays_known: bool, asked: str = "") -> Finding:
    """Say what was found out, and what to do where it is not enough; ``asked`` names whom, and is empty for nobody."""
    seen = ", ".join(sorted({view.seen for view in found.views if view.seen}))
    relayed = (
        "others reach it through relays" if relays_known else "name a relay with --relay (decentral relay runs one)"
    )
    give = f"and give --listen /ip4/0.0.0.0/tcp/{_PORT}"
    forward = f"; for a way in, forward a TCP port on the router, such as {_PORT}, {give}"
    hidden = "ok" if relays_known else "warn"
    match found.kind:
        case "public":
            how = f"dialled back at {seen}" if found.views else "an interface has a public address; nobody was asked"
            return Finding("ok", "reached", f"public: {how}")
        case "local":
            return Finding("ok", "reached", f"local: dialled back at {seen}; nobody outside this network was asked")
        case "nat":
            return Finding(hidden, "reached", f"behind a port-preserving NAT, seen at {seen}: {relayed}{forward}")
        case "symmetric nat":
            return Finding(hidden, "reached", f"behind a symmetric NAT, seen at {seen}: {relayed}{forward}")
        case "firewall":
            return Finding(
                hidden,
                "reached",
                f"behind a firewall, seen at {seen}: open a TCP port, such as {_PORT}, {give}, or {relayed}",
            )
        case _:
            return Finding(
                "warn", "reached", f"nobody could say whether others can dial this machine: {_why(found, asked)}"
            )


def _why(found: Reachability, asked: str) -> str:
    """Why nobody could say, and what to try."""
    if found.views:
        return "who was asked did not reach it, or did not try; ask others with another invite, or --relay ADDR"
    if not asked:
        return "give an invite, or --relay ADDR"
    return (
        f"nobody at {asked} answered; is somebody up there, and this machine on the internet? Try a fresh invite (in "
        "decentral status of every peer that is up), or --relay ADDR"
    )


def _label(where: str) -> str:
    return short_name(where.rpartition("/p2p/")[2])


# ---- the fastest of several cards ----
#
# A peer that can be reached in several ways tells which network card is the fast one.

MOST_WAYS = 4  # of one peer, which answers 64 such questions a day
_WORTH_SAYING = 1.5  # times as fast as the next: less may be chance
_DIAL_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Way:
    """From one of this machine's cards to one address of a peer."""

    card: str  # empty where the system does not tell
    address: str  # without /p2p/
    speed: Speed


async def speed_to(where: str) -> Speed:
    """Measure the speed of the path to this address. Raises DecentralError."""
    peer = peer_from_name(where.rpartition("/p2p/")[2])
    async with NativeTransport(Signer.generate(), listen=("/ip4/127.0.0.1/tcp/0",)) as transport:
        with anyio.move_on_after(_DIAL_SECONDS):
            await transport.connect(peer, (where,))
        return await measure_speed(transport, peer)


def ways_to(
    addresses: Sequence[str],
    measure: Callable[[str], Speed] = lambda where: anyio.run(speed_to, where),
    known: Cards | None = None,
) -> list[Way]:
    """Measure one after the other the ways to the addresses of the first peer, each over a connection of its own."""
    known = cards() if known is None else known
    direct = [where for where in addresses if endpoint(where.partition("/p2p/")[0]) is not None]
    first = [where for where in direct if where.rpartition("/p2p/")[2] == direct[0].rpartition("/p2p/")[2]]
    found = []
    for where in first[:MOST_WAYS]:
        with suppress(DecentralError):
            found.append(Way(_card_towards(where, known), where.partition("/p2p/")[0], measure(where)))
    return found


def card_findings(ways: Sequence[Way]) -> Iterator[Finding]:
    """A line for each when there are several; the last says which card to use, if it makes a difference."""
    if len(ways) < 2:
        return
    ranked = sorted(ways, key=lambda way: -min(way.speed.up, way.speed.down))
    for way in ranked:
        rates = f"{way.speed.up / 1e6:.1f} Mbit/s up, {way.speed.down / 1e6:.1f} down"
        yield Finding("ok", "card", f"at least {rates}, from {way.card or 'this machine'} to {way.address}")
    best, next_ = ranked[0], ranked[1]
    if min(best.speed.up, best.speed.down) > _WORTH_SAYING * min(next_.speed.up, next_.speed.down):
        there = best.address.rpartition("/tcp/")[0]
        here = f"start this peer with --listen {best.card} and " if best.card else ""
        yield Finding("warn", "card", f"the first is the fastest: {here}the other with --listen {there}/tcp/0")


def _card_towards(where: str, known: Cards) -> str:
    end = endpoint(where.partition("/p2p/")[0])
    if end is None:
        return ""
    family = socket.AF_INET6 if ":" in end[0] else socket.AF_INET
    with suppress(OSError):
        return card_of(source_of(family, end[0]), known)
    return ""
