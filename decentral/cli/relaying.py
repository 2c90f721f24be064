"""A relay from its start to its end: what it prints and says now and then, the runs that it keeps, its numbers."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import click
import psutil
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from decentral.cli.group import Stop, stop_signals
from decentral.cli.ports import host_and_port, metrics_socket
from decentral.errors import UsageError
from decentral.observe.metrics import serve_metrics
from decentral.swarm.identity import Identity
from decentral.swarm.invite import Invite
from decentral.transport.base import check_listen, is_public
from decentral.transport.daemon.process import tether
from decentral.transport.native.relay import Relay
from decentral.transport.native.tcp import endpoint
from decentral.transport.native.transport import NativeOptions, NativeTransport
from decentral.transport.paths import serve_dialback
from decentral.transport.protocols.circuit import RelayLimits

_SAY_EVERY = 60.0  # s; only when something has changed


@dataclass(frozen=True, slots=True)
class RelayPlan:
    """A relay as the command line asks for it."""

    listen: tuple[str, ...]
    announce: tuple[str, ...]
    limits: RelayLimits
    metrics: str | None
    identity: Path
    keeping: Keeping


def run_relay(plan: RelayPlan) -> int:
    """Relay until a signal; returns the exit code it means."""
    where = None if plan.metrics is None else host_and_port(plan.metrics)
    for address in plan.announce:
        if endpoint(address) is None or "/p2p/" in address:
            raise UsageError(f"--announce {address!r}: want /ip4/HOST/tcp/PORT or /dns4/NAME/tcp/PORT, and no more")
    plan.keeping.check()
    check_listen(plan.listen)  # before its key is made
    with stop_signals() as stop:
        anyio.run(_run_relay, plan, where, stop, backend="asyncio")
        return stop.code or 0


async def _run_relay(plan: RelayPlan, where: tuple[str, int] | None, stop: Stop) -> None:
    asked, loop = anyio.Event(), asyncio.get_running_loop()

    def leave() -> None:
        loop.call_soon_threadsafe(asked.set)  # from a signal's handler: the loop may be asleep

    stop.gently(leave)
    options = NativeOptions(announce=plan.announce, relay=plan.limits)
    async with AsyncExitStack() as stack:
        metrics = None if where is None else await metrics_socket(where, stack, partial(click.echo, err=True))
        identity = Identity.load_or_create(plan.identity)
        transport = NativeTransport(identity.signer, listen=plan.listen, options=options, limits=plan.limits.streams)
        serve_dialback(transport)
        await stack.enter_async_context(transport)
        relay = transport.relay
        assert relay is not None, "asked for"
        async with anyio.create_task_group() as group:
            if metrics is not None:
                group.start_soon(serve_metrics, metrics, partial(relay_numbers, relay), lambda: (True, "relaying"))
            for line in introduction(transport.addresses()):
                click.echo(line)
            click.echo(_terms(plan.limits), err=True)
            for sentence in advice(transport.addresses(), keeps=bool(plan.keeping.invites)):
                click.echo(sentence, err=True)
            group.start_soon(_report, relay)
            group.start_soon(keep, plan.keeping, plan.listen, transport.addresses()[0])
            await asked.wait()
            group.cancel_scope.cancel()


def introduction(addresses: tuple[str, ...]) -> Iterator[str]:
    """The lines that others paste, public addresses first."""
    for address in addresses:
        yield f"--relay {address}"


def advice(addresses: tuple[str, ...], *, keeps: bool) -> Iterator[str]:
    """Say what to do when nobody outside can dial any of them, or when a run's peers may all be gone one day."""
    if not any(is_public(address) for address in addresses):
        yield (
            "none of these addresses is public, so only peers of this network reach the relay; if another address "
            "leads here, give it as --announce /ip4/HOST/tcp/PORT"
        )
    if not keeps:
        yield (
            "a relay knows no run: should peers come when all others have gone, start it with --keep INVITE, and it "
            "follows that run and gives them its last state (this takes torch)"
        )


def status_line(relay: Relay, seconds: float, nbytes: int) -> str:
    """How it is now; ``nbytes`` were passed on in the last ``seconds``."""
    limits = relay.limits
    return (
        f"{relay.places} of {limits.places} places, {relay.connections} of {limits.connections} connections, "
        f"{relay.counts.nbytes / 1e6:.1f} MB relayed, {8 * nbytes / seconds / 1e6:.1f} Mbit/s"
    )


async def _report(relay: Relay, say: Callable[[str], None] = lambda line: click.echo(line, err=True)) -> None:
    """A line a minute, while there is news."""
    before, nbytes, began = "", relay.counts.nbytes, anyio.current_time()
    while True:
        await anyio.sleep(_SAY_EVERY)
        now, total = anyio.current_time(), relay.counts.nbytes
        line = status_line(relay, now - began, total - nbytes)
        if line != before:
            say(line)
        before, nbytes, began = line, total, now


def _terms(limits: RelayLimits) -> str:
    rate = "no cap on the rate" if limits.rate is None else f"{8 * limits.rate / 1e6:g} Mbit/s"
    return f"room for {limits.places} places and {limits.connections} connections at a time, {rate}; Ctrl-C ends it"


# ---- runs that it keeps ----
#
# A follower of each, for those who come when all peers have gone.
#
# Each is ``decentral follow`` in a process of its own: the relay stays as small as it is, and a model that is too
# large, or a peer that sends rubbish, ends a follower and not the relay.

MOST_KEPT = 4  # runs: each holds a model and its outer state in memory
ANCHOR_EVERY = 10  # rounds between two anchors that are written
_LEAVE_SECONDS = 10.0  # what a follower needs to keep its state
_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 600.0  # s until a follower that failed is started again
_IN_VAIN = (2, 10, 11, 12, 21, 50)  # exit codes after which it would fail again


@dataclass(frozen=True, slots=True)
class Keeping:
    """The runs that are kept, and where."""

    invites: tuple[str, ...]
    folder: Path  # each run has its own in there
    disk: int  # bytes that each may take

    def check(self) -> None:
        """UsageError for too many, or one twice; InviteError."""
        runs = [Invite.parse(invite).run for invite in self.invites]
        if len(runs) > MOST_KEPT:
            raise UsageError(
                f"--keep: {len(runs)} runs, a relay keeps {MOST_KEPT} at most; start another relay for the rest"
            )
        if len(set(runs)) < len(runs):
            raise UsageError("--keep: two invites are of the same run; one will do")

    def command(self, number: int, listen: Sequence[str], relay: str) -> list[str]:
        """How the follower of one run is started, which has its invite from its environment; ``relay`` is the relay's
        own address.
        """
        invite = self.invites[number]
        where = [part for address in listen for part in ("--listen", follower_address(address, number))]
        out = self.folder / Invite.parse(invite).run.hex()[:8]
        kept = ["--every", str(ANCHOR_EVERY), "--keep", "1", "--keep-serving", "--max-disk", f"{self.disk / 1e6:.6f}MB"]
        ways = ["--relay", relay, "--transport", "native", "--no-lan", *where]
        return [sys.executable, "-m", "decentral", "follow", "--out", str(out), *kept, *ways]


def follower_address(address: str, number: int) -> str:
    """Where the follower of run ``number`` listens: a port after the relay's, so that its invites stay true."""
    head, _, port = address.rpartition("/tcp/")
    if not port.isdecimal():
        return address
    return f"{head}/tcp/{int(port) + 1 + number if int(port) else 0}"


async def keep(keeping: Keeping, listen: Sequence[str], relay: str) -> None:
    """Follow all of them until cancelled."""
    async with anyio.create_task_group() as group:
        for number in range(len(keeping.invites)):
            group.start_soon(_follow, keeping.command(number, listen, relay), keeping.invites[number])


async def _follow(command: Sequence[str], invite: str) -> None:
    pause, run = _FIRST_PAUSE, Invite.parse(invite).run.hex()[:8]
    while (code := await _run_follower(command, invite)) not in _IN_VAIN:
        click.echo(f"the follower of run {run} ended (code {code}); again in {pause:.0f} s", err=True)
        await anyio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    click.echo(f"run {run} is not kept (code {code}): see the line above", err=True)


async def _run_follower(command: Sequence[str], invite: str) -> int:
    """Its exit code. What it says on stderr goes to the relay's; it ends with the relay, and keeps its state.

    All users of this machine may read its command line, and its own user alone its environment.
    """
    process = await anyio.open_process(
        tether(command) if sys.platform == "linux" else command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=None,
        env={**os.environ, "DECENTRAL_INVITE": invite},
        start_new_session=True,  # Ctrl-C reaches the relay alone, which then ends it
    )
    try:
        return await process.wait()
    finally:
        with anyio.CancelScope(shield=True):
            await _end(process)


async def _end(process: anyio.abc.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    with anyio.move_on_after(_LEAVE_SECONDS):
        await process.wait()
        return
    process.kill()
    await process.wait()


# ---- numbers for Prometheus ----
#
# The names are public: dashboards are built on them.

_OURS = "decentral_relay"


def relay_numbers(relay: Relay) -> Iterator[Metric]:
    """Yield the numbers of this moment."""
    limits, counts = relay.limits, relay.counts
    yield _gauge("peers", "Peers with a connection.", relay.peers)
    yield _gauge("places", "Peers that can be reached through here.", relay.places)
    yield _gauge("places_limit", "Places there are.", limits.places)
    yield _gauge("connections", "Connections relayed now.", relay.connections)
    yield _gauge("connections_limit", "Connections relayed at most.", limits.connections)
    yield _counter("bytes", "Bytes passed on, both directions.", counts.nbytes)
    yield _counter("joined", "Connections relayed since the start.", counts.joined)
    yield _counter("granted", "Places given and renewed since the start.", counts.granted)
    refused = CounterMetricFamily(f"{_OURS}_refused", "Questions refused, by answer.", labels=["status"])
    for status, count in sorted(counts.refused.items()):
        refused.add_metric([status.name.lower()], count)
    yield refused
    memory = psutil.Process().memory_info().rss
    yield GaugeMetricFamily("process_resident_memory_bytes", "Resident memory of the process.", memory)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{_OURS}_{name}", text, value)


def _counter(name: str, text: str, value: float) -> Metric:
    """Prometheus knows it by this name and ``_total``."""
    return CounterMetricFamily(f"{_OURS}_{name}", text, value)
