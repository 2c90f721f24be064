"""A relay from its start to its end: what it prints, and what it says now and then."""

import asyncio
import ipaddress
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import click

from decentral.cli.keeping import Keeping, keep
from decentral.cli.metrics_port import host_and_port, metrics_socket
from decentral.cli.relay.numbers import numbers
from decentral.cli.stopping import Stop, stop_signals
from decentral.errors import UsageError
from decentral.observe.metrics import serve_metrics
from decentral.swarm.identity import Identity
from decentral.transport.base import check_listen
from decentral.transport.native.tcp import endpoint
from decentral.transport.native.transport import NativeOptions, NativeTransport
from decentral.transport.probes import serve_dialback
from decentral.transport.relay.circuit import RelayLimits
from decentral.transport.relay.service import Relay

_SAY_EVERY = 60.0  # s; only when something has changed


@dataclass(frozen=True, slots=True)
class RelayPlan:
    """What the command line asks for."""

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
        anyio.run(_run, plan, where, stop, backend="asyncio")
        return stop.code or 0


async def _run(plan: RelayPlan, where: tuple[str, int] | None, stop: Stop) -> None:
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
                group.start_soon(serve_metrics, metrics, partial(numbers, relay), lambda: (True, "relaying"))
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
    """What to do when nobody outside can dial any of them, or a run's peers may all have gone when somebody comes."""
    if not any(_is_public(address) for address in addresses):
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


def _is_public(address: str) -> bool:
    parts = address.split("/")
    if parts[1] not in ("ip4", "ip6"):
        return True  # a name: somebody announced it on purpose
    return ipaddress.ip_address(parts[2]).is_global
