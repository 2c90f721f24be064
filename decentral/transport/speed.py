"""How fast is the path to a peer: a body there, the same body back. For people who ask, never for rounds.

Crosses the wire: at most 1 MiB each way, from one peer at a time. What training knows of links it measures on its
own frames (transport/uplink.py).
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import anyio

from decentral.errors import TransportError
from decentral.transport.base import Stream, Transport

SPEED = "/decentral/speed/1"
NBYTES = 1 << 20
_PATIENCE = 30.0  # s for all of it: 0.6 Mbit/s


@dataclass(frozen=True, slots=True)
class Speed:
    """Payload bits per second of one transfer: a lower bound, as slow start is in it."""

    up: float
    down: float


def serve_speed(transport: Transport) -> None:
    """Send back what comes, to one peer at a time. Before the transport is entered."""
    busy = anyio.Semaphore(1)

    async def echo(stream: Stream) -> None:
        try:
            busy.acquire_nowait()
        except anyio.WouldBlock:
            raise TransportError("a speed is being measured already; the next one is refused") from None
        try:
            with anyio.move_on_after(_PATIENCE):
                await stream.send(b"!")  # who is refused learns it before it has sent anything
                body = await stream.receive_exactly(NBYTES)
                await stream.send(b"!")
                await stream.receive_exactly(1)
                await stream.send(body)
                await stream.receive_exactly(1)
        finally:
            busy.release()

    transport.serve(SPEED, echo)


async def measure_speed(transport: Transport, peer: bytes) -> Speed:
    """Of the path to ``peer``. Raises TransportError, also when somebody else measures there now."""
    stream = await transport.open(peer, SPEED)
    try:
        with anyio.fail_after(_PATIENCE):
            await stream.receive_exactly(1)
            began = anyio.current_time()
            await stream.send(os.urandom(NBYTES))  # nothing on the way could squeeze it
            await stream.receive_exactly(1)
            sent = anyio.current_time()
            await stream.send(b"!")
            await stream.receive_exactly(NBYTES)
            came = anyio.current_time()
            await stream.send(b"!")
    except TimeoutError:
        raise TransportError(f"{NBYTES} bytes each way took longer than {_PATIENCE:g} s; try again") from None
    finally:
        await stream.aclose()
    return Speed(8 * NBYTES / (sent - began), 8 * NBYTES / (came - sent))
