"""``decentral relay`` as people run it: what it prints, what it answers, how it ends, and what it costs to start."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import anyio
import psutil
import pytest
import trio
import trio.testing

from decentral.cli.ports import host_and_port
from decentral.cli.relaying import _report, advice, introduction
from decentral.errors import PeerUnreachable, UsageError
from decentral.transport.base import Traffic
from decentral.transport.native.links import LinkOptions, Links
from decentral.transport.native.relay import Relay
from decentral.transport.native.sessions import SessionEvents
from decentral.transport.native.transport import NativeOptions, NativeTransport
from decentral.transport.protocols.circuit import HOP, RelayLimits, admit, pass_through, reserve
from decentral.transport.protocols.yamux import NativeStream
from decentral.transport.requests import request, serve_requests
from decentral.wire.keys import Signer, peer_from_name, peer_name
from tests.kit.patience import PATIENCE

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
START = [sys.executable, "-c", "from decentral.cli import main; main()", "relay"]


@contextmanager
def relay(folder: Path, *arguments: str, listen: str = LOOPBACK) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A relay in a process of its own, and the first address it prints."""
    command = [*START, "--listen", listen, *arguments]
    with (folder / "stderr.txt").open("a") as errors:
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdout is not None
        word, address = process.stdout.readline().split()
        assert word == "--relay"
        yield process, address
    finally:
        process.kill()
        process.communicate()


def said(folder: Path) -> str:
    return (folder / "stderr.txt").read_text()


def metrics_url(folder: Path) -> str:
    while not (found := re.search(r"metrics at (http://\S+)", said(folder))):
        anyio.run(anyio.sleep, 0.05)
    return found[1]


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return str(answer.read().decode())


async def talk_through(address: str) -> None:
    """Two peers, one of which only the relay at ``address`` leads to, exchange a body."""
    hidden, other = (
        NativeTransport(Signer.generate(), listen=(LOOPBACK,), options=options)
        for options in (NativeOptions(relays=(address,), announce=("/ip4/127.0.0.1/tcp/1",)), NativeOptions())
    )

    async def echo(peer: bytes, body: bytes) -> bytes:
        return body

    serve_requests(hidden, "/test/echo", echo, limit=1 << 20)
    async with hidden, other:
        with anyio.fail_after(PATIENCE):
            while not any("/p2p-circuit" in found for found in hidden.addresses()):
                await anyio.sleep(0.05)
            await other.connect(hidden.peer, (f"{address}/p2p-circuit/p2p/{peer_name(hidden.peer)}",))
            body = bytes(1 << 20)
            assert await request(other, hidden.peer, "/test/echo", body, limit=1 << 20, timeout=30) == body


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_relay_carries_tells_prometheus_and_ends_when_it_is_asked(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with relay(tmp_path, "--metrics", "0", "--max-peers", "5", "--max-rate", "80mbit") as (process, address):
        anyio.run(talk_through, address)
        shown = fetch(metrics_url(tmp_path))
        values = {
            name: float(value)
            for name, value in (line.split(" ") for line in shown.splitlines() if not line.startswith("#"))
        }
        assert values["decentral_relay_places_limit"] == 5
        assert values["decentral_relay_joined_total"] == 1
        assert values["decentral_relay_bytes_total"] > 2 << 20
        assert 10 << 20 < values["process_resident_memory_bytes"] < 256_000_000
        with pytest.raises(urllib.error.HTTPError, match="404"):
            fetch(metrics_url(tmp_path).replace("/metrics", "/other"))
        process.send_signal(number)
        assert process.wait(PATIENCE) == code
    assert "room for 5 places and " in said(tmp_path)
    assert "80 Mbit/s; Ctrl-C ends it" in said(tmp_path)
    assert "none of these addresses is public" in said(tmp_path)
    assert "Traceback" not in said(tmp_path)


class Deaf(NativeTransport):
    """A peer that takes what a relay brings, sends all it can and reads nothing."""

    def __init__(self) -> None:
        super().__init__(Signer.generate(), listen=(LOOPBACK,))
        self.taken: list[NativeStream] = []
        self.links.admit = self._take  # type: ignore[method-assign]

    async def _take(self, stream: NativeStream) -> None:
        await admit(stream)
        self.taken.append(stream)


async def filled(process: psutil.Process, address: str, room: int) -> int:
    """Memory with all the connections there is room for, both ends sending and neither reading."""
    relay = peer_from_name(address.rpartition("/p2p/")[2])
    deaf, pouring = [Deaf() for _ in range(1 + room // 4)], Deaf()
    async with AsyncExitStack() as stack:
        for peer in (*deaf, pouring):
            await stack.enter_async_context(peer)
            await peer.connect(relay, (address,))
            await reserve(await peer.open(relay, HOP))
        async with anyio.create_task_group() as group:
            for n in range(room):
                stream = await pouring.open(relay, HOP)
                await pass_through(stream, deaf[n % len(deaf)].peer)
                group.start_soon(stream.send, bytes(8 << 20))
            with pytest.raises(PeerUnreachable, match="201"):
                await pass_through(await pouring.open(relay, HOP), deaf[-1].peer)
            for stream in (stream for peer in deaf for stream in peer.taken):
                group.start_soon(stream.send, bytes(8 << 20))
            await anyio.sleep(2)
            nbytes = int(process.memory_info().rss)
            group.cancel_scope.cancel()
    return nbytes


@pytest.mark.long
def test_the_memory_it_is_given_is_kept_when_all_connections_are_there_and_nobody_reads(tmp_path: Path) -> None:
    room = RelayLimits.within(110 * 10**6, places=8).connections
    assert room > 10
    with relay(tmp_path, "--max-memory", "110MB", "--max-peers", "8", "--metrics", "0") as (process, address):
        assert anyio.run(filled, psutil.Process(process.pid), address, room) < 110 * 10**6


def test_a_relay_that_was_killed_comes_back_under_its_name_and_its_peers_take_their_places_again(
    tmp_path: Path,
) -> None:
    with relay(tmp_path) as (process, address):
        process.kill()
        process.wait()
    where, _, name = address.rpartition("/p2p/")
    with relay(tmp_path, listen=where) as (_, again):
        assert again == address
        assert peer_from_name(name)
        anyio.run(talk_through, again)


def test_a_relay_starts_without_torch_numpy_or_hivemind_and_is_small(tmp_path: Path) -> None:
    wanted = "decentral.cli.relay", "decentral.cli.relaying"
    script = f"import sys, json, {', '.join(wanted)}; print(json.dumps(sorted(sys.modules)))"
    loaded = set(json.loads(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout))
    assert set(wanted) < loaded
    assert not loaded & {"torch", "numpy", "hivemind", "accelerate", "transformers"}
    with relay(tmp_path) as (process, _):
        assert psutil.Process(process.pid).memory_info().rss < 64 << 20  # 37 MB were measured


def test_a_line_is_said_each_minute_in_which_something_changed() -> None:
    events = SessionEvents(lambda session, stream: None)
    links = Links(Signer.generate(), LinkOptions(), Traffic(), events)  # nobody has found it yet
    relay = Relay(links, RelayLimits(places=7))
    lines: list[str] = []

    async def script() -> None:
        with anyio.move_on_after(60 * 10 + 1):
            async with anyio.create_task_group() as group:
                group.start_soon(_report, relay, lines.append)
                await anyio.sleep(90)
                relay.counts.nbytes = 75_000_000

    trio.run(script, clock=trio.testing.MockClock(autojump_threshold=0))
    start = "0 of 7 places, 0 of 128 connections"
    assert lines == [
        f"{start}, 0.0 MB relayed, 0.0 Mbit/s",
        f"{start}, 75.0 MB relayed, 10.0 Mbit/s",
        f"{start}, 75.0 MB relayed, 0.0 Mbit/s",
    ]


def test_public_addresses_need_no_advice_and_others_one_sentence() -> None:
    private, public, name = (f"/{where}/tcp/4001/p2p/X" for where in ("ip4/10.0.0.1", "ip4/8.8.8.8", "dns4/a.example"))
    assert list(introduction((public, private))) == [f"--relay {public}", f"--relay {private}"]
    assert list(advice((public, private), keeps=True)) == list(advice((name,), keeps=True)) == []
    (sentence,) = advice((private,), keeps=True)
    assert "--announce /ip4/HOST/tcp/PORT" in sentence


def test_a_relay_that_keeps_no_run_says_what_keeping_one_is_good_for(tmp_path: Path) -> None:
    """Its operator learnt of --keep when the run's last peer had gone, and with it what late comers would have had."""
    with relay(tmp_path, "--announce", "/dns4/relay.example.org/tcp/4001"):
        while "\n" not in said(tmp_path).partition("a relay knows no run")[2]:
            anyio.run(anyio.sleep, 0.05)
    assert "when all others have gone, start it with --keep INVITE, and it follows that run" in said(tmp_path)
    assert list(advice(("/dns4/a.example/tcp/4001/p2p/X",), keeps=True)) == []


def test_what_is_announced_is_what_is_printed(tmp_path: Path) -> None:
    with relay(tmp_path, "--announce", "/dns4/relay.example.org/tcp/4001") as (_, address):
        assert address.startswith("/dns4/relay.example.org/tcp/4001/p2p/12D3KooW")
    assert "none of these addresses is public" not in said(tmp_path)


@pytest.mark.parametrize(
    ("text", "meant"),
    [("9400", ("127.0.0.1", 9400)), ("localhost:1", ("127.0.0.1", 1)), ("[::1]:2", ("::1", 2))],
)
def test_metrics_are_on_localhost_unless_an_address_is_named(text: str, meant: tuple[str, int]) -> None:
    assert host_and_port(text) == meant
    with pytest.raises(UsageError):
        host_and_port("metrics.example.org:9400")
