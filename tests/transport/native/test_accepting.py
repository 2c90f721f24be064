"""Connections that come in while their transport ends: at no moment is one left open that nobody holds."""

from __future__ import annotations

import gc
import socket
import warnings

import anyio
import pytest

from decentral.transport.native.sessions import accept_for_ever
from decentral.transport.native.tcp import bound_addresses, endpoint, listeners
from decentral.transport.protocols.noise import close_now


@pytest.mark.parametrize("steps", range(8))
def test_no_socket_is_dropped_whenever_accepting_is_cancelled(steps: int):
    """Each number of the loop's steps between a connection and the end is another moment of its acceptance."""

    async def held(stream: anyio.abc.SocketStream) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            await close_now(stream)

    async def script() -> None:
        (listener,) = await listeners(["/ip4/127.0.0.1/tcp/0"])
        end = endpoint(bound_addresses([listener])[0])
        assert end is not None
        async with listener, anyio.create_task_group() as group:
            group.start_soon(accept_for_ever, listener, group, held)
            await anyio.wait_all_tasks_blocked()
            with socket.create_connection(end):
                for _ in range(steps):
                    await anyio.sleep(0)
                group.cancel_scope.cancel()
        await anyio.sleep(0)  # asyncio closes a transport in the step after

    with warnings.catch_warnings(record=True) as dropped:
        warnings.simplefilter("always")
        anyio.run(script)
        gc.collect()
    assert [str(one.message) for one in dropped if one.category is ResourceWarning] == []
