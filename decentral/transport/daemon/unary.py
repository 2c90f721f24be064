"""hivemind's client of our daemon, for its DHT: attached, counted, and taken down without a trace.

Unary calls reach 50-100 MB/s and hold whole messages in memory: the DHT's small records only, never frames.
"""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from decentral.errors import PayloadError
from decentral.transport.base import Traffic
from decentral.transport.protocols.peer_ids import peer_from_id

_ATTACHING = 2.0  # s: a daemon on this machine answers in milliseconds, or is dead


@asynccontextmanager
async def attached(folder: Path, socket: str, traffic: Traffic) -> AsyncIterator[Any]:  # Any: untyped hivemind
    """A hivemind.P2P on the daemon behind ``socket``, closed when left; its own socket goes into ``folder``."""
    await anyio.to_thread.run_sync(quiet_hivemind, abandon_on_cancel=True)  # takes a second or three
    from hivemind.p2p import P2P
    from hivemind.utils.multiaddr import Multiaddr

    private: Any = type("PrivateP2P", (P2P,), {"_UNIX_SOCKET_PREFIX": f"/unix{folder}/"})
    with anyio.fail_after(_ATTACHING, shield=True):  # cancelled meanwhile, it would leave its connection open
        client = await private.replicate(Multiaddr(f"/unix{socket}"))
    control = client._client.control
    _count_calls(control, traffic)
    try:
        yield client
    finally:
        await client.shutdown()
        await _take_down(control)


def _count_calls(control: Any, traffic: Traffic) -> None:  # Any: hivemind's ControlClient
    call, add = control.call_unary_handler, control.add_unary_handler

    async def counted_call(peer: Any, protocol: str, data: bytes) -> bytes:
        _book(traffic, peer, sent=len(data))
        answer: bytes = await call(peer, protocol, data)
        _book(traffic, peer, received=len(answer))
        return answer

    async def counted_add(
        protocol: str, handler: Callable[[bytes, Any], Awaitable[bytes]], *rest: Any, **more: Any
    ) -> None:
        async def counted(data: bytes, peer: Any) -> bytes:
            _book(traffic, peer, received=len(data))
            answer = await handler(data, peer)
            _book(traffic, peer, sent=len(answer))
            return answer

        await add(protocol, counted, *rest, **more)

    control.call_unary_handler, control.add_unary_handler = counted_call, counted_add


def _book(traffic: Traffic, peer: Any, *, sent: int = 0, received: int = 0) -> None:
    try:
        traffic.add(peer_from_id(peer.to_bytes()), sent=sent, received=received)
    except PayloadError:  # not one of ours; the bytes were exchanged all the same
        traffic.total.sent += sent
        traffic.total.received += received


async def _take_down(control: Any) -> None:
    """End the client's tasks and look at what they ended with, or asyncio prints it when they are collected."""
    tasks = [task for task in (control._read_task, control._write_task) if task is not None]
    tasks += control._handler_tasks.values()
    for task in tasks:
        task.cancel()
    for call in control._pending_calls.values():
        call.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def quiet_hivemind() -> None:
    """Import hivemind and keep its log lines off stderr: what matters of them comes as our errors and events."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's, about how hivemind is written
        from hivemind.utils.logging import use_hivemind_log_handler
    use_hivemind_log_handler("nowhere")
    log = logging.getLogger("hivemind")
    log.propagate = False
    if not log.handlers:
        log.addHandler(logging.NullHandler())
