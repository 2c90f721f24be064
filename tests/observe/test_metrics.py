"""What Prometheus is told, to the byte, and what a peer that asks something else costs."""

import anyio
import pytest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

from decentral.cli.relaying import relay_numbers
from decentral.observe.metrics import exposition, serve_metrics
from decentral.observe.status import QUANTITIES
from decentral.transport.native.transport import NativeOptions, NativeTransport
from decentral.transport.protocols.circuit import HopStatus, RelayLimits
from decentral.wire.keys import Signer
from tests.kit.patience import PATIENCE

PLACES = GaugeMetricFamily("places", "Places held.", 3)
REFUSED = CounterMetricFamily("refused", "Refusals.", labels=["status"])
REFUSED.add_metric(["no_reservation"], 2)
REFUSED.add_metric(["malformed"], 0.5)


def test_numbers_are_written_as_prometheus_reads_them() -> None:
    assert exposition(lambda: [PLACES, REFUSED]) == (
        b"# HELP places Places held.\n"
        b"# TYPE places gauge\n"
        b"places 3.0\n"
        b"# HELP refused_total Refusals.\n"
        b"# TYPE refused_total counter\n"
        b'refused_total{status="no_reservation"} 2.0\n'
        b'refused_total{status="malformed"} 0.5\n'
    )


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize(
    ("request_", "begins", "ends"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"HTTP/1.1 200 OK\r\n", b"\nplaces 3.0\n"),
        (b"HEAD /metrics HTTP/1.0\r\n\r\n", b"HTTP/1.1 200 OK\r\n", b"Connection: close\r\n\r\n"),
        (b"GET /healthz HTTP/1.1\r\n\r\n", b"HTTP/1.1 503 Service Unavailable\r\n", b"\nstalled: in round 7\n"),
        (b"GET /secrets HTTP/1.1\r\n\r\n", b"HTTP/1.1 404 Not Found\r\n", b"/healthz\n"),
        (b"\x16\x03\x01" + b"\xff" * 9000, b"HTTP/1.1 404 Not Found\r\n", b"/healthz\n"),
    ],
)
def test_a_request_is_answered_and_its_connection_closed(
    backend: str, request_: bytes, begins: bytes, ends: bytes
) -> None:
    async def script() -> None:
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        async with listener, anyio.create_task_group() as group:
            group.start_soon(serve_metrics, listener, lambda: [PLACES], lambda: (False, "stalled: in round 7"))
            silent = [await anyio.connect_tcp("127.0.0.1", port) for _ in range(5)]
            with anyio.fail_after(PATIENCE):
                async with await anyio.connect_tcp("127.0.0.1", port) as stream:
                    await stream.send(request_)
                    answer = b""
                    while not answer.endswith(ends):
                        answer += await stream.receive()
            assert answer.startswith(begins)
            for stream in silent:
                await stream.aclose()
            group.cancel_scope.cancel()

    anyio.run(script, backend=backend)


def test_a_relay_tells_the_same_names_in_every_release() -> None:
    relay = NativeTransport(Signer.generate(), options=NativeOptions(relay=RelayLimits())).relay
    relay.counts.refused[HopStatus.NO_RESERVATION] += 1

    async def script() -> str:
        return exposition(lambda: relay_numbers(relay)).decode()

    told = anyio.run(script)
    assert [line.split(" ")[0] for line in told.splitlines() if not line.startswith("#")] == [
        "decentral_relay_peers",
        "decentral_relay_places",
        "decentral_relay_places_limit",
        "decentral_relay_connections",
        "decentral_relay_connections_limit",
        "decentral_relay_bytes_total",
        "decentral_relay_joined_total",
        "decentral_relay_granted_total",
        'decentral_relay_refused_total{status="no_reservation"}',
        "process_resident_memory_bytes",
    ]


def test_each_quantity_of_a_status_has_names_of_its_own_and_a_meaning() -> None:
    quantities = QUANTITIES.values()
    in_prometheus = [
        quantity.gauge or quantity.counter for quantity in quantities if quantity.gauge or quantity.counter
    ]
    in_trackers = [quantity.tracker for quantity in quantities if quantity.tracker]
    for names in (in_prometheus, in_trackers):
        assert len(set(names)) == len(names)
    assert all(quantity.meaning for quantity in quantities if quantity.gauge or quantity.counter)
