"""What Prometheus is told, to the byte, and what who asks something else costs."""

import anyio
import pytest

from decentral.observe.prometheus import Metric, exposition, serve_metrics

PLACES = Metric("places", "gauge", "Places held.", {"": 3})
REFUSED = Metric("refused_total", "counter", "Refusals.", {"no_reservation": 2, "malformed": 0.5}, "status")


def test_numbers_are_written_as_prometheus_reads_them() -> None:
    assert exposition([PLACES, REFUSED]) == (
        "# HELP places Places held.\n"
        "# TYPE places gauge\n"
        "places 3\n"
        "# HELP refused_total Refusals.\n"
        "# TYPE refused_total counter\n"
        'refused_total{status="no_reservation"} 2\n'
        'refused_total{status="malformed"} 0.5\n'
    )


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize(
    ("request_", "begins", "ends"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"HTTP/1.1 200 OK\r\n", b"\r\n\r\nnow 1\n"),
        (b"HEAD /metrics HTTP/1.0\r\n\r\n", b"HTTP/1.1 200 OK\r\n", b"Connection: close\r\n\r\n"),
        (b"GET /secrets HTTP/1.1\r\n\r\n", b"HTTP/1.1 404 Not Found\r\n", b"/metrics\n"),
        (b"\x16\x03\x01" + b"\xff" * 9000, b"HTTP/1.1 404 Not Found\r\n", b"/metrics\n"),
    ],
)
def test_a_request_is_answered_and_its_connection_closed(
    backend: str, request_: bytes, begins: bytes, ends: bytes
) -> None:
    async def script() -> None:
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        async with listener, anyio.create_task_group() as group:
            group.start_soon(serve_metrics, listener, lambda: "now 1\n")
            silent = [await anyio.connect_tcp("127.0.0.1", port) for _ in range(5)]
            with anyio.fail_after(20):
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
