"""Who sits where, on what line, and what goes wrong: one table, read by ``make natlab``.

The first seat founds the run. What a scenario still lacks is said in ``missing``: it is played all the same, and
shows what it gives today; one that needs nothing any more must lose its mark.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tests.natlab.lab import DUAL, IPV4, IPV6
from tests.natlab.nat import FIREWALL, PORT_PRESERVING, SYMMETRIC, UDP_BLOCKED, Nat
from tests.natlab.wires import Line

HOME = Line(up=10, down=50, delay=0.0125)  # a common volunteer: 25 ms from the core and back
THIN = Line(up=2, down=20, delay=0.0125)
SERVER = Line(up=100, down=100, delay=0.0125)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One peer's place. Seats with the same ``home`` share a gateway and a line."""

    name: str
    nat: Nat | None = None  # None: a public address
    line: Line = HOME
    families: frozenset[int] = IPV4
    carrier: Nat | None = None
    home: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """What happens to a seat's line once so many rounds are committed."""

    kind: Literal["cut", "renumber", "kill relay"]
    seat: str = ""  # whose line it is
    after_rounds: int = 3
    seconds: float = 0.0  # how long a cut lasts, or until the relay is started again


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One situation that a swarm must train in."""

    name: str
    seats: tuple[Seat, ...]
    relay: Line | None = None  # a public host runs ``decentral relay`` behind this line, and all peers know it
    trouble: Trouble | None = None
    least_with_all: float = 0.75  # share of the rounds that must name a frame of every peer
    missing: str | None = None


SERVER_SEAT = Seat(name="server", line=SERVER)


def _homes(first: Nat, second: Nat, carriers: tuple[Nat | None, Nat | None] = (None, None)) -> tuple[Seat, ...]:
    """A public peer and two private ones."""
    alice = Seat(name="alice", nat=first, carrier=carriers[0])
    bob = Seat(name="bob", nat=second, carrier=carriers[1])
    return (SERVER_SEAT, alice, bob)


def _public(line: Line) -> tuple[Seat, ...]:
    return tuple(Seat(name=name, line=line) for name in ("alice", "bob", "carol"))


TABLE: tuple[Scenario, ...] = (
    Scenario(name="public", seats=_public(HOME)),
    Scenario(name="one-private", seats=(SERVER_SEAT, Seat(name="alice", nat=PORT_PRESERVING))),
    Scenario(name="port-preserving-pair", seats=_homes(PORT_PRESERVING, PORT_PRESERVING)),
    Scenario(name="symmetric-pair", seats=_homes(SYMMETRIC, SYMMETRIC)),
    Scenario(name="mixed-pair", seats=_homes(PORT_PRESERVING, SYMMETRIC)),
    Scenario(
        name="carrier-grade",
        seats=_homes(PORT_PRESERVING, PORT_PRESERVING, (SYMMETRIC, PORT_PRESERVING)),
    ),
    Scenario(name="udp-blocked", seats=_homes(UDP_BLOCKED, PORT_PRESERVING)),
    Scenario(
        name="same-home",
        seats=(
            SERVER_SEAT,
            Seat(name="alice", nat=PORT_PRESERVING, home="home"),
            Seat(name="bob", nat=PORT_PRESERVING, home="home"),
        ),
    ),
    Scenario(
        name="ipv6-only",
        seats=(
            Seat(name="server", line=SERVER, families=DUAL),
            Seat(name="alice", nat=FIREWALL, families=IPV6),
            Seat(name="bob", nat=PORT_PRESERVING, families=DUAL),
        ),
    ),
    Scenario(
        name="no-public-peer",
        seats=(Seat(name="alice", nat=PORT_PRESERVING), Seat(name="bob", nat=PORT_PRESERVING)),
        relay=SERVER,
    ),
    Scenario(
        name="no-public-peer-symmetric",
        seats=(Seat(name="alice", nat=SYMMETRIC), Seat(name="bob", nat=SYMMETRIC)),
        relay=SERVER,
    ),
    Scenario(
        name="relay-dies-and-returns",
        seats=(Seat(name="alice", nat=SYMMETRIC), Seat(name="bob", nat=SYMMETRIC)),
        relay=SERVER,
        trouble=Trouble(kind="kill relay", seconds=10),
        least_with_all=0.3,
    ),
    Scenario(name="far-away", seats=_public(Line(up=10, down=50, delay=0.075))),
    Scenario(name="lossy", seats=_public(Line(up=10, down=50, delay=0.0125, loss=0.01))),
    Scenario(
        name="thin-uplink",
        seats=(*_public(HOME)[:2], Seat(name="carol", line=THIN)),
    ),
    Scenario(
        name="line-dies-and-returns",
        seats=(SERVER_SEAT, Seat(name="alice", nat=PORT_PRESERVING)),
        trouble=Trouble(kind="cut", seat="alice", seconds=15),
        least_with_all=0.3,
    ),
    Scenario(
        name="address-changes",
        seats=(SERVER_SEAT, Seat(name="alice", nat=PORT_PRESERVING)),
        trouble=Trouble(kind="renumber", seat="alice"),
        least_with_all=0.3,
    ),
    Scenario(
        name="public-line-dies",
        seats=_public(HOME),
        trouble=Trouble(kind="cut", seat="carol", seconds=15),
        least_with_all=0.3,
    ),
)
