"""py-libp2p as it is shipped: a host of it, and a relay, for our peers to meet."""

from __future__ import annotations

from contextlib import asynccontextmanager

import trio
from libp2p import generate_new_ed25519_identity, new_host
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.relay.circuit_v2.protocol import CircuitV2Protocol
from libp2p.relay.circuit_v2.resources import RelayLimits
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from decentral.transport.pylibp2p.transport import TrioThread
from decentral.wire.keys import PeerId, peer_from_name

HERE = "/ip4/127.0.0.1/tcp/0"


class Stock:
    """A host, once it runs, in the thread that ``running`` makes."""

    def __init__(self, *, relays: bool = False) -> None:
        self.relays, self._relay = relays, None
        self.host = new_host(key_pair=generate_new_ed25519_identity())
        self.peer = peer_from_name(str(self.host.get_id()))

    def addresses(self) -> tuple[str, ...]:
        return tuple(str(address) for address in self.host.get_addrs())

    def keeps_a_place_for(self, peer: PeerId) -> bool:
        """Whether others can be brought to ``peer`` through this relay."""
        assert self._relay is not None, "it runs, as a relay"
        return any(peer_from_name(str(one)) == peer for one in self._relay.resource_manager._reservations)

    @asynccontextmanager
    async def inside(self):
        async with self.host.run([Multiaddr(HERE)]):
            if not self.relays:
                yield
                await self.host.close()  # leaving alone would leave the sockets that it dialled
                return
            generous = RelayLimits(duration=3600, data=1 << 32, max_circuit_conns=8, max_reservations=8)
            self._relay = CircuitV2Protocol(self.host, generous, allow_hop=True)
            async with background_trio_service(self._relay):
                yield


@asynccontextmanager
async def running(stock: Stock):
    """Run it beside this loop."""
    async with TrioThread(stock.inside()) as thread:
        yield thread


async def read_exactly(stream, nbytes: int) -> bytes:
    """Its own gives up at a read of nothing, which its muxer also returns in the middle of a body."""
    held = bytearray()
    while len(held) < nbytes:
        held += await stream.read(nbytes - len(held))
        await trio.lowlevel.checkpoint()
    return bytes(held)


async def echo(stream) -> None:
    """Answer one request of ours with its own body."""
    try:
        nbytes = await read_exactly(stream, 4)
        await stream.write(nbytes + await read_exactly(stream, int.from_bytes(nbytes, "little")))
    finally:
        await stream.close()


async def ask(host, address: str, protocol: str, body: bytes) -> bytes:
    """Dial one of ours, and have its answer to one request."""
    await host.connect(info_from_p2p_addr(Multiaddr(address)))
    stream = await host.new_stream(info_from_p2p_addr(Multiaddr(address)).peer_id, [protocol])
    await stream.write(len(body).to_bytes(4, "little") + body)
    nbytes = int.from_bytes(await read_exactly(stream, 4), "little")
    answer = await read_exactly(stream, nbytes)
    await stream.close()
    return answer
