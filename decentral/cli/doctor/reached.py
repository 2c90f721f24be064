"""What ``decentral doctor`` says of the way to other peers: who can dial this machine, how fast, and what to do."""

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio

from decentral.cli.doctor.cards import speed_to, told, ways_to
from decentral.cli.findings import Finding
from decentral.errors import DecentralError
from decentral.observe.health import short_name
from decentral.peer.network_setup import check_relays
from decentral.swarm.invite import Invite
from decentral.transport.reachability import Reachability, probe, relays_among
from decentral.wire.keys import peer_name

_SKEW_SECONDS = 30.0  # nothing here needs clocks to agree; logs are read side by side

if TYPE_CHECKING:
    from collections.abc import Sequence


def reachable(listen: "Sequence[str]", relays: "Sequence[str]", invite: str | None) -> Iterator[Finding]:
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
        yield from told(ways_to(others))


def verdict(found: Reachability, *, relays_known: bool, asked: str = "") -> Finding:
    """What was found out, and what to do where it is not enough; ``asked`` names whom, and is empty for nobody."""
    seen = ", ".join(sorted({view.seen for view in found.views if view.seen}))
    ports = ", ".join(sorted({address.rpartition("/")[2] for address in found.listen}))
    relayed = (
        "others reach it through relays" if relays_known else "name a relay with --relay (decentral relay runs one)"
    )
    forward = f"; for a way in, forward TCP port {ports} on the router and give --listen /ip4/0.0.0.0/tcp/{ports}"
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
            return Finding(hidden, "reached", f"behind a firewall, seen at {seen}: open TCP port {ports}, or {relayed}")
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
