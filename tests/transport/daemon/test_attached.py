"""hivemind's client of our daemon leaves nothing behind, whenever it is given up."""

from __future__ import annotations

import asyncio
from pathlib import Path

import anyio

from decentral.transport.base import Traffic
from decentral.transport.daemon.control import _messages, _read_delimited
from decentral.transport.daemon.transport import hivemind_client
from decentral.transport.protocols.messages import peer_to_id, varint

SLOW = 0.2  # s


class SlowDaemon:
    """Answers each request after a while, and knows how many connections are open."""

    def __init__(self) -> None:
        self.open = self.asked = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            await _read_delimited(reader)
            self.asked += 1
            await asyncio.sleep(SLOW)
            answer = _messages().Response(type=0)
            answer.identify.id = peer_to_id(bytes(32))
            writer.write(varint(len(answer.SerializeToString())) + answer.SerializeToString())
            while await reader.read(1 << 10):
                pass
        finally:
            writer.close()
            self.open -= 1


async def test_a_client_that_is_given_up_while_it_attaches_leaves_no_connection(tmp_path: Path) -> None:
    daemon, socket = SlowDaemon(), str(tmp_path / "d.sock")
    server = await asyncio.start_unix_server(daemon.serve, socket)
    async with server, anyio.create_task_group() as group:

        async def attach() -> None:
            async with hivemind_client(tmp_path, socket, Traffic()):
                await anyio.sleep_forever()

        group.start_soon(attach)
        with anyio.fail_after(60):
            while not daemon.asked:
                await anyio.sleep(0.01)
            group.cancel_scope.cancel()
    with anyio.fail_after(10):
        while daemon.open:
            await anyio.sleep(0.01)
