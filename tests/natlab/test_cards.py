"""Two machines joined by a slow card and a fast one: which is which is measured, and can be chosen by name."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import anyio
import pytest

from decentral.cli.checks import card_findings, ways_to
from decentral.transport.interfaces import cards, listen_addresses
from decentral.transport.native.transport import NativeTransport
from decentral.transport.paths import serve_speed
from decentral.wire.keys import Signer
from tests.natlab.lab import Lab
from tests.natlab.namespaces import Namespace

HERE, THERE = Signer(bytes([1]) * 32), Signer(bytes([2]) * 32)
RATES = {"wifi": "10mbit", "wire": "100mbit"}
PATIENCE = 30.0  # s; it takes 2


@pytest.fixture
def machines(lab: Lab) -> tuple[Namespace, Namespace]:
    """Two of them, 10.9.1.x over the slow card and 10.9.2.x over the fast one."""
    near, far = lab.namespace("near"), lab.namespace("far")
    for number, (card, rate) in enumerate(RATES.items(), start=1):
        near.ip(f"link add {card} type veth peer name {card} netns {far.path}")
        for last, machine in ((1, near), (2, far)):
            machine.ip(f"addr add 10.9.{number}.{last}/24 dev {card}", f"link set {card} up")
            machine.tc(f"qdisc add dev {card} root tbf rate {rate} burst 32k latency 200ms")
    return near, far


async def _answer(found_at: Future[tuple[str, ...]], over: threading.Event, listen: str) -> None:
    transport = NativeTransport(THERE, listen=listen_addresses(listen, cards()))
    serve_speed(transport)
    async with transport:
        found_at.set_result(transport.addresses())
        await anyio.to_thread.run_sync(over.wait, PATIENCE)


def _look(away: Any, machines: tuple[Namespace, Namespace], listen: str) -> tuple[tuple[str, ...], list[Any]]:
    """The addresses of who listens there, and the ways from here."""
    near, far = machines
    found_at: Future[tuple[str, ...]] = Future()
    over = threading.Event()
    answering = away(far, anyio.run, _answer, found_at, over, listen)
    try:
        addresses = found_at.result(PATIENCE)
        return addresses, away(near, ways_to, addresses).result(PATIENCE)
    finally:
        over.set()
        answering.result(PATIENCE)


def test_the_doctor_measures_each_card_and_names_the_fastest(machines: tuple[Namespace, Namespace], away: Any) -> None:
    addresses, ways = _look(away, machines, "/ip4/0.0.0.0/tcp/0")
    assert {where.split("/")[2] for where in addresses} == {"10.9.1.2", "10.9.2.2"}
    rate = {way.card: way.speed.down for way in ways}
    assert rate["wire"] > 2 * rate["wifi"]
    assert rate["wifi"] < 10e6
    *_, advice = card_findings(ways)
    assert "with --listen wire and the other with --listen /ip4/10.9.2.2/tcp/0" in advice.detail


def test_a_peer_that_listens_on_the_fast_card_is_found_at_no_other(
    machines: tuple[Namespace, Namespace], away: Any
) -> None:
    addresses, ways = _look(away, machines, "wire")
    assert {where.split("/")[2] for where in addresses} == {"10.9.2.2"}
    assert [way.card for way in ways] == ["wire"]
    assert list(card_findings(ways)) == []
