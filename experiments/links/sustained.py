"""One stream for minutes between two namespaces with a delay between them: how fast, and does memory stay flat?

    python -m experiments.links.sustained --transport daemon --minutes 10 --rtt 0.05

As root on Linux; see docs/natlab.md for what it needs. Without --mbit the lines are as fast as the machine makes them.
Prints the mean rate, that of the slowest ten seconds, and by how much resident sets grew after the first minute.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import anyio
import psutil

from decentral.errors import StreamClosed
from decentral.swarm.identity import Identity
from decentral.transport import Transport
from decentral.transport.base import Stream
from decentral.transport.choice import make_transport
from decentral.wire.keys import peer_from_name
from tests.natlab.lab import Host, Lab
from tests.natlab.namespaces import why_impossible
from tests.natlab.wires import Line

PROTOCOL = "/sustained"
PIECE = 1 << 18  # bytes sent at a time, as bodies are
WINDOW = 10.0  # s between samples
SETTLED = 6  # samples until buffers and heaps have their size


def main() -> int:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=["daemon", "native"], default="daemon")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rtt", type=float, default=0.05, help="seconds")
    parser.add_argument("--mbit", type=float, default=None)
    parser.add_argument("--end", nargs="+", help=argparse.SUPPRESS)  # host, key, address: this process is one end
    given = parser.parse_args()
    if given.end:
        anyio.run(_end, given.transport, 60 * given.minutes, *given.end)
        return 0
    if why := why_impossible():
        print(f"error: {why}", file=sys.stderr)
        return 1
    with Lab() as lab, tempfile.TemporaryDirectory() as folder:
        line = Line(up=given.mbit, down=given.mbit, delay=given.rtt / 4)
        hosts = [lab.public(name, line) for name in ("reader", "writer")]
        print(json.dumps({"transport": given.transport, "minutes": given.minutes, **_measured(hosts, folder, given)}))
    return 0


def _measured(hosts: list[Host], folder: str, given: argparse.Namespace) -> dict[str, object]:
    command = [sys.executable, "-m", "experiments.links.sustained", "--transport", given.transport]
    command += ["--minutes", str(given.minutes), "--end"]
    reader = hosts[0].start(*command, str(hosts[0].v4), f"{folder}/a.key", stdout=subprocess.PIPE)
    assert reader.stdout is not None
    address = json.loads(reader.stdout.readline())["address"]
    writer = hosts[1].start(*command, str(hosts[1].v4), f"{folder}/b.key", address, stdout=subprocess.PIPE)
    assert writer.stdout is not None
    sent = [json.loads(line) for line in writer.stdout]
    came = [json.loads(line) for line in reader.stdout]
    rates = [1e-6 * one["nbytes"] / one["seconds"] for one in came]
    return {
        "mean_MBps": round(sum(one["nbytes"] for one in came) * 1e-6 / sum(one["seconds"] for one in came), 1),
        "slowest_MBps": round(min(rates), 1),
        "samples": len(rates),
        "grown_mib": {"reader": _growth(came), "writer": _growth(sent)},
    }


def _growth(samples: list[dict[str, dict[str, float]]]) -> dict[str, float]:
    """MiB that each process held at most after it had settled, over what it held at most until then."""
    until, after = samples[:SETTLED], samples[SETTLED:] or samples[-1:]
    names = samples[-1]["rss"]
    return {n: round(max(s["rss"][n] for s in after) - max(s["rss"].get(n, 0.0) for s in until), 1) for n in names}


# ---- one end ----


async def _end(kind: str, seconds: float, host: str, key: str, address: str = "") -> None:
    identity = Identity.load_or_create(Path(key))
    transport = make_transport(kind, identity, (f"/ip4/{host}/tcp/4001",))
    ended = anyio.Event()

    async def read(stream: Stream) -> None:
        meter = _Meter()
        with suppress(StreamClosed):
            while True:
                meter.count(len(await stream.receive_exactly(PIECE)))
        ended.set()

    transport.serve(PROTOCOL, read)
    async with transport:
        if address:
            await _write(transport, address, seconds)
        else:
            print(json.dumps({"address": transport.addresses()[0]}), flush=True)
            await ended.wait()


async def _write(transport: Transport, address: str, seconds: float) -> None:
    peer, meter, piece = peer_from_name(address.rpartition("/p2p/")[2]), _Meter(), bytes(PIECE)
    await transport.connect(peer, [address])
    stream = await transport.open(peer, PROTOCOL)
    with anyio.move_on_after(seconds):
        while True:
            await stream.send(piece)
            meter.count(PIECE)
    await stream.aclose()


class _Meter:
    """Says every ten seconds how much moved, and what this process and its daemon hold, in MiB."""

    def __init__(self) -> None:
        self._nbytes, self._began = 0, anyio.current_time()

    def count(self, nbytes: int) -> None:
        self._nbytes += nbytes
        now = anyio.current_time()
        if now - self._began >= WINDOW:
            print(json.dumps({"nbytes": self._nbytes, "seconds": now - self._began, "rss": _held()}), flush=True)
            self._nbytes, self._began = 0, now


def _held() -> dict[str, float]:
    me = psutil.Process()
    daemons = [one.memory_info().rss for one in me.children() if one.name() == "p2pd"]
    return {"peer": me.memory_info().rss / 2**20} | ({"daemon": max(daemons) / 2**20} if daemons else {})


if __name__ == "__main__":
    sys.exit(main())
