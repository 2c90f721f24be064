"""Two bare transports behind gateways, and some relays: is the path relayed or punched, how soon, how fast?

    python -m tests.natlab.pairs --only port-preserving --runs 20 --json pairs.json

No training, so a run takes seconds: what the transport alone can do, before anything above it. The path is read off
the bytes that cross the core.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from decentral.errors import DecentralError
from tests.natlab.flows import between
from tests.natlab.lab import Host, Lab
from tests.natlab.namespaces import why_impossible
from tests.natlab.nat import PORT_PRESERVING, SYMMETRIC, Nat
from tests.natlab.relay import RelaySeat
from tests.natlab.wires import Line

LINE = Line(up=20, down=100, delay=0.0125)
PORT = 4001
RESERVING = 30.0  # s for a relay to take a peer in
WARM_UP = 6.0  # s for the daemon to learn its public address; a punch that is tried before is not tried again
PUNCHING = 15.0  # s from the first contact
TRIAL, BULK = 200_000, 4_000_000  # bytes
PATHS = ("punched", "relayed", "cut off", "none")  # cut off: relayed, by a relay that ends a transfer of 4 MB
NATIVE = ("native", "native")
PY_LIBP2P = "py-libp2p"
_OPTIONS: dict[str, dict[str, str]] = {"daemon": {"reachability": "private"}, "native": {}, PY_LIBP2P: {}}
_LOOK_EVERY = 0.2  # s


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Alice and Bob, each behind a gateway of this kind."""

    name: str
    alice: Nat
    bob: Nat
    carrier: Nat | None = None  # Bob's
    kinds: tuple[str, str] = ("daemon", "daemon")  # Alice's and Bob's transports; Alice dials
    relays: int = 5  # daemons, which punch only once several observers agree on their address; 0: one `decentral relay`


TABLE = (
    Pair(name="port-preserving", alice=PORT_PRESERVING, bob=PORT_PRESERVING),
    Pair(name="one relay only", alice=PORT_PRESERVING, bob=PORT_PRESERVING, relays=1),
    Pair(name="symmetric", alice=SYMMETRIC, bob=SYMMETRIC),
    Pair(name="mixed", alice=PORT_PRESERVING, bob=SYMMETRIC),
    Pair(name="carrier-grade", alice=PORT_PRESERVING, bob=PORT_PRESERVING, carrier=PORT_PRESERVING),
    Pair(name="carrier symmetric", alice=PORT_PRESERVING, bob=PORT_PRESERVING, carrier=SYMMETRIC),
    Pair(name="native", alice=PORT_PRESERVING, bob=PORT_PRESERVING, kinds=NATIVE, relays=0),
    Pair(name="native symmetric", alice=SYMMETRIC, bob=SYMMETRIC, kinds=NATIVE, relays=0),
    Pair(name="native mixed", alice=PORT_PRESERVING, bob=SYMMETRIC, kinds=NATIVE, relays=0),
    Pair(
        name="native carrier-grade",
        alice=PORT_PRESERVING,
        bob=PORT_PRESERVING,
        carrier=PORT_PRESERVING,
        kinds=NATIVE,
        relays=0,
    ),
    Pair(name="native to daemon", alice=PORT_PRESERVING, bob=PORT_PRESERVING, kinds=("native", "daemon")),
    Pair(name="daemon to native", alice=PORT_PRESERVING, bob=PORT_PRESERVING, kinds=("daemon", "native")),
    Pair(name="py-libp2p", alice=PORT_PRESERVING, bob=PORT_PRESERVING, kinds=(PY_LIBP2P, PY_LIBP2P), relays=0),
    Pair(name="py-libp2p symmetric", alice=SYMMETRIC, bob=SYMMETRIC, kinds=(PY_LIBP2P, PY_LIBP2P), relays=0),
    Pair(name="py-libp2p to native", alice=PORT_PRESERVING, bob=PORT_PRESERVING, kinds=(PY_LIBP2P, "native"), relays=0),
    Pair(name="native to py-libp2p", alice=PORT_PRESERVING, bob=PORT_PRESERVING, kinds=("native", PY_LIBP2P), relays=0),
    Pair(name="py-libp2p to daemon", alice=PORT_PRESERVING, bob=PORT_PRESERVING, kinds=(PY_LIBP2P, "daemon")),
    Pair(name="daemon to py-libp2p", alice=PORT_PRESERVING, bob=PORT_PRESERVING, kinds=("daemon", PY_LIBP2P)),
)


@dataclass(frozen=True, slots=True)
class Found:
    """One run."""

    pair: str
    path: str  # see PATHS
    contact: float | None = None  # s until the first bytes, from the dial
    punched: float | None = None  # s until bytes went directly, from the first contact
    mbit: float | None = None  # of the last transfer


class Agent:
    """A transport in its own process; see ``agent``."""

    def __init__(self, host: Host, folder: Path, kind: str = "daemon", **options: Any) -> None:  # Any: its options
        self.number = host.number
        where = host.v4 if host.name.startswith("relay") else "0.0.0.0"
        listen = [f"/ip4/{where}/tcp/{PORT}"]
        home = folder / host.name
        home.mkdir()
        words = ("-m", "tests.natlab.agent", kind, str(home), json.dumps(listen), json.dumps(options))
        self._process = host.start(sys.executable, *words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.name = ""

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def until_up(self) -> None:
        self.name = self._hear()["name"]

    def ask(self, do: str, **order: Any) -> dict[str, Any]:  # Any: JSON
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"do": do, **order}) + "\n")
        self._process.stdin.flush()
        return self._hear()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise DecentralError(f"an agent ended with {self._process.wait()}; see what it wrote above")
        return dict(json.loads(line))


def play(pair: Pair, folder: Path, line: Line = LINE, patience: float = PUNCHING, bulk: int = BULK) -> Found:
    """One run of a pair: on such lines, waiting so many seconds for a punch, and then moving so many bytes."""
    with Lab() as lab, ExitStack() as stack:
        known = _relays(pair, lab, line, stack, folder)
        homes = (
            lab.household("alice", pair.alice, line).host("alice"),
            lab.household("bob", pair.bob, line, carrier=pair.carrier).host("bob"),
        )
        alice, bob = (
            stack.enter_context(Agent(host, folder, kind, relays=known, **_OPTIONS[kind]))
            for host, kind in zip(homes, pair.kinds, strict=True)
        )
        for agent in (alice, bob):
            agent.until_up()
            for address in known:
                agent.ask("connect", peer=address.rpartition("/p2p/")[2], addresses=[address])
        addresses = _reserved(bob, WARM_UP if "daemon" in pair.kinds else 0.0)
        if not addresses:
            return Found(pair.name, "none")
        return _judge(pair, lab, alice, bob, addresses, patience, bulk)


def _relays(pair: Pair, lab: Lab, line: Line, stack: ExitStack, folder: Path) -> list[str]:
    """Where they are."""
    if not pair.relays:
        seat = RelaySeat(lab.public("relay", Line(delay=line.delay)), folder / "relay")
        stack.callback(seat.kill)
        seat.start()
        return [seat.address]
    hosts = [lab.public(f"relay{number}", Line(delay=line.delay)) for number in range(pair.relays)]
    relays = [stack.enter_context(Agent(host, folder, reachability="public")) for host in hosts]
    for relay in relays:
        relay.until_up()
    return [f"/ip4/{host.v4}/tcp/{PORT}/p2p/{relay.name}" for host, relay in zip(hosts, relays, strict=True)]


def _reserved(agent: Agent, warm_up: float) -> list[str]:
    """Its addresses, once one leads through a relay and it had time to learn what it looks like from outside."""
    began, nobody = time.monotonic(), threading.Event()
    while time.monotonic() - began < RESERVING:
        found: list[str] = agent.ask("addresses")["addresses"]
        if any("p2p-circuit" in address for address in found) and time.monotonic() - began >= warm_up:
            return found
        nobody.wait(_LOOK_EVERY)
    return []


def _judge(pair: Pair, lab: Lab, alice: Agent, bob: Agent, addresses: list[str], patience: float, nbytes: int) -> Found:
    dialled, nobody = time.monotonic(), threading.Event()
    alice.ask("connect", peer=bob.name, addresses=addresses)
    first = alice.ask("fetch", peer=bob.name, nbytes=1)
    if "error" in first:
        return Found(pair.name, "none")
    met, punched = time.monotonic(), None
    while punched is None and time.monotonic() - met < patience:
        if _directly(lab, alice, bob):
            punched = round(time.monotonic() - met, 2)
        else:
            nobody.wait(_LOOK_EVERY)
    bulk = alice.ask("fetch", peer=bob.name, nbytes=nbytes)
    mbit = round(8e-6 * nbytes / bulk["seconds"], 1) if "seconds" in bulk else None
    path = "punched" if punched is not None else "relayed" if mbit is not None else "cut off"
    return Found(pair.name, path, round(met - dialled, 2), punched, mbit)


def _directly(lab: Lab, alice: Agent, bob: Agent) -> bool:
    """Whether a fetch goes from one household to the other."""
    before = between(lab.flows(), [alice.number], [bob.number])
    alice.ask("fetch", peer=bob.name, nbytes=TRIAL)
    return between(lab.flows(), [alice.number], [bob.number]) - before > TRIAL / 2


def summary(name: str, found: list[Found]) -> str:
    """One line for all runs of a pair."""
    counts = ", ".join(
        f"{sum(one.path == path for one in found)} {path}" for path in PATHS if any(one.path == path for one in found)
    )
    medians = (_median(found, "contact", " s"), _median(found, "punched", " s"), _median(found, "mbit", ""))
    return _line(name, counts, *medians)


def _line(*words: str) -> str:
    return " ".join(f"{word:<{width}}" for word, width in zip(words, (24, 24, 8, 8, 7), strict=True)).rstrip()


def _median(found: list[Found], field: str, unit: str) -> str:
    values = [getattr(one, field) for one in found if getattr(one, field) is not None]
    return f"{statistics.median(values):.1f}{unit}" if values else "-"


def main() -> int:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=[pair.name for pair in TABLE], help="may be repeated")
    parser.add_argument("--runs", type=int, default=1, help="of each pair")
    parser.add_argument("--json", type=Path, default=None, help="where to write every run")
    given = parser.parse_args()
    if why := why_impossible():
        print(f"error: {why}", file=sys.stderr)
        return 1
    everything = []
    print(_line("pair", "runs", "contact", "punched", "Mbit/s"), flush=True)
    for pair in (one for one in TABLE if not given.only or one.name in given.only):
        found = []
        for _ in range(given.runs):
            with tempfile.TemporaryDirectory(prefix="decentral-pairs-") as folder:
                found.append(play(pair, Path(folder)))
        print(summary(pair.name, found), flush=True)
        everything += found
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(one) for one in everything], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
