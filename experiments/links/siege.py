"""Rounds of real peers while one of them is beset by strangers: how much longer they take, and what it costs in memory.

    python -m experiments.links.siege --transport daemon --attack connections
    python -m experiments.links.siege --transport native --attack withheld --rounds 8

The attacks: ``connections``, 1,000 TCP connections that say nothing; ``identities``, 250 that shake hands, each under a
key of its own, and then say nothing; ``lengths``, 576 streams of nine strangers that announce 4 GiB; ``withheld``, as
many that announce a body of a size that is taken and do not send it. What is closed is opened again. ``none`` is to
compare with: a peer keeps the frames of late rounds, and grows by them. All on loopback.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

import anyio
import psutil

from decentral.benchmarks.exchange import Case, Worker, step, swarm
from decentral.dissemination.broadcast import PUSH
from decentral.errors import DecentralError
from decentral.rounds.frame_io import CONTROL
from decentral.swarm.contacts import LEASES
from decentral.transport.native.tcp import endpoint
from decentral.transport.native.transport import NativeTransport
from decentral.wire.keys import PeerId, Signer, peer_from_name

ATTACKS = ("none", "connections", "identities", "lengths", "withheld")
CONNECTIONS, IDENTITIES, STRANGERS, STREAMS = 1000, 250, 9, 64
LINK = 2.5e6  # bytes/s each way: rounds then take as long as their links need, not as long as two cores do
WARM = 4  # rounds until a peer holds all the buffers that it will
SPREADING = 5.0  # s for a siege to stand
_WITHHELD = 1 << 20  # bytes announced; the largest frame of the run is larger


def main() -> int:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attack", choices=ATTACKS, default="connections")
    parser.add_argument("--transport", choices=["daemon", "native"], default="daemon")
    parser.add_argument("--peers", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=4, help="of float32")
    parser.add_argument("--rounds", type=int, default=6, help="before, and again during the siege")
    parser.add_argument("--again", type=float, default=1.0, help="seconds before what was closed is opened again")
    parser.add_argument("--besiege", nargs="+", help=argparse.SUPPRESS)  # addresses: this process is the attacker
    given = parser.parse_args()
    if given.besiege:
        anyio.run(_besiege, given.attack, given.again, given.besiege)
        return 0
    rates = (LINK,) * given.peers
    case = Case(kind="gather", rows=given.megabytes * 256, ups=rates, downs=rates, transport=given.transport)
    with tempfile.TemporaryDirectory() as folder:
        print(
            json.dumps(
                {
                    "attack": given.attack,
                    "transport": given.transport,
                    **_measured(case, Path(folder), given),
                }
            )
        )
    return 0


def _measured(case: Case, folder: Path, given: argparse.Namespace) -> dict[str, object]:
    processes: list[subprocess.Popen[str]] = []

    def launch(number: int, command: Sequence[str]) -> subprocess.Popen[str]:
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return processes[-1]

    with swarm(case, folder, launch) as workers:
        _rounds(workers, WARM, processes[0].pid)
        quiet, before = _rounds(workers, given.rounds, processes[0].pid)
        with _attacker(given, workers[0].addresses):
            threading.Event().wait(SPREADING)
            under, during = _rounds(workers, given.rounds, processes[0].pid)
    return {
        "quiet_seconds": round(quiet, 2),
        "besieged_seconds": round(under, 2),
        "ratio": round(under / quiet, 2),
        "grown_mib": {name: round((during[name] - before[name]) / 2**20, 1) for name in before},
    }


def _rounds(workers: Sequence[Worker], count: int, pid: int) -> tuple[float, dict[str, int]]:
    """Median seconds of a round, and the most that the first peer and its daemon held meanwhile."""
    with _watched(pid) as most:
        seconds = []
        for _ in range(count):
            done = step(workers)
            seconds.append(done.seconds)
            print(f"{done.seconds:.2f} s, {done.contributors} contributed, equal {done.equal}", file=sys.stderr)
    return median(seconds), most


@contextmanager
def _watched(pid: int) -> Iterator[dict[str, int]]:
    """The largest resident set of a process, and of its daemon, while the block lasts; bytes."""
    most, done = {"peer": 0}, threading.Event()

    def look() -> None:
        while not done.wait(0.2):
            with suppress(psutil.Error):
                peer = psutil.Process(pid)
                most["peer"] = max(most["peer"], peer.memory_info().rss)
                daemons = [one.memory_info().rss for one in peer.children() if one.name() == "p2pd"]
                if daemons:
                    most["daemon"] = max(most.get("daemon", 0), *daemons)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()


# ---- the attacker ----


@contextmanager
def _attacker(given: argparse.Namespace, addresses: Sequence[str]) -> Iterator[None]:
    command = [sys.executable, "-m", "experiments.links.siege", "--attack", given.attack]
    command += ["--again", str(given.again), "--besiege", *addresses]
    process = subprocess.Popen(command)
    try:
        yield
        if process.poll() is not None:
            raise DecentralError(f"the attacker ended with {process.returncode}; see what it wrote above")
    finally:
        process.kill()
        process.wait()


async def _besiege(attack: str, again: float, addresses: Sequence[str]) -> None:
    async with anyio.create_task_group() as group:
        if attack == "none":
            await anyio.sleep_forever()
        elif attack == "connections":
            for _ in range(CONNECTIONS):
                group.start_soon(_say_nothing, addresses[0], again)
        elif attack == "identities":
            for number in range(IDENTITIES):
                group.start_soon(_stranger, addresses, (), b"", again, number * 0.02)
        else:
            said = (b"\xff" * 4) if attack == "lengths" else _WITHHELD.to_bytes(4, "little") + b"and no more"
            protocols = (PUSH, CONTROL, LEASES) if attack == "lengths" else (PUSH,)
            for _ in range(STRANGERS):
                group.start_soon(_stranger, addresses, protocols, said, again, 0.0)


async def _say_nothing(address: str, again: float) -> None:
    found = endpoint(address)
    assert found is not None, "a TCP address"
    while True:
        with suppress(OSError):
            async with await anyio.connect_tcp(*found) as stream:
                with suppress(anyio.BrokenResourceError, anyio.EndOfStream):
                    while True:
                        await stream.receive()
        await anyio.sleep(again)


async def _stranger(
    addresses: Sequence[str], protocols: Sequence[str], said: bytes, again: float, later: float
) -> None:
    """One identity, with as many streams as it may have."""
    await anyio.sleep(later)
    victim = peer_from_name(addresses[0].rpartition("/p2p/")[2])
    async with (
        NativeTransport(Signer.generate(), listen=("/ip4/127.0.0.1/tcp/0",)) as own,
        anyio.create_task_group() as group,
    ):
        for number in range(STREAMS if protocols else 0):
            group.start_soon(_hold, own, victim, protocols[number % len(protocols)], said, again)
        while True:
            with suppress(DecentralError):
                await own.connect(victim, addresses)
            await anyio.sleep(again)


async def _hold(own: NativeTransport, victim: PeerId, protocol: str, said: bytes, again: float) -> None:
    while True:
        with suppress(DecentralError):
            stream = await own.open(victim, protocol)
            await stream.send(said)
            await stream.receive_exactly(1)
        await anyio.sleep(again)


if __name__ == "__main__":
    sys.exit(main())
