"""js-libp2p peers: ``peer.mjs`` in its own process, driven by JSON lines. Its orders are at the top of that script."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
from anyio.streams.buffered import BufferedByteReceiveStream

from decentral.wire.keys import PeerId, peer_from_name, peer_name

_SCRIPT = Path(__file__).with_name("peer.mjs")
_LONGEST_LINE = 1 << 16
_TO_START, _TO_ANSWER, _TO_END = 20.0, 40.0, 5.0  # s; one order may take 30 s of its own


class JavascriptPeer:
    """A running one."""

    def __init__(self, process: anyio.abc.Process) -> None:
        assert process.stdin is not None, "started with pipes"
        assert process.stdout is not None, "started with pipes"
        self._input, self._lines = process.stdin, BufferedByteReceiveStream(process.stdout)
        self.addresses: tuple[str, ...] = ()

    @property
    def peer(self) -> PeerId:
        """Who it is, by its addresses."""
        return peer_from_name(self.addresses[0].rpartition("/p2p/")[2])

    async def started(self) -> None:
        """Wait until it listens."""
        with anyio.fail_after(_TO_START):
            self.addresses = tuple((await self._said())["addresses"])

    async def order(self, order: str, **details: Any) -> Any:
        """Have it do something and return what it says to that."""
        await self._input.send(json.dumps({"order": order, **details}).encode() + b"\n")
        with anyio.fail_after(_TO_ANSWER):
            said = await self._said()
        assert "error" not in said, said["error"]
        return said

    async def until_guest(self, peer: PeerId) -> None:
        """Wait until a peer keeps a place at this one."""
        while peer_name(peer) not in (await self.order("guests"))["peers"]:
            await anyio.sleep(0.02)

    async def _said(self) -> Any:
        return json.loads(await self._lines.receive_until(b"\n", _LONGEST_LINE))


@asynccontextmanager
async def javascript_peer(*listen: str) -> AsyncIterator[JavascriptPeer]:
    """A js-libp2p peer that listens on these addresses; it ends with the block, or with this process."""
    async with await anyio.open_process(["node", str(_SCRIPT), *listen], stderr=None) as process:
        try:
            peer = JavascriptPeer(process)
            await peer.started()
            yield peer
        finally:
            with anyio.CancelScope(shield=True):
                await _end(process)


async def _end(process: anyio.abc.Process) -> None:
    assert process.stdin is not None, "started with pipes"
    await process.stdin.aclose()
    with anyio.move_on_after(_TO_END):
        await process.wait()
    if process.returncode is None:
        process.kill()
