"""An owner and its keepers on a network in memory, under virtual time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

import trio
import trio.testing

from decentral.flow.waiting import inline
from decentral.manifest import Redundancy
from decentral.redundancy.giver import Giver, WayOut
from decentral.redundancy.keeper import Keeper
from decentral.redundancy.labels import Seals
from decentral.redundancy.recovery import Recovered, Recovery
from decentral.transport.memory import MemoryNetwork, MemoryTransport
from decentral.transport.requests import request
from decentral.wire.keys import PeerId, Signer

RUN = bytes([0xAA] * 32)
SIGNERS = sorted((Signer(bytes([n] * 32)) for n in range(1, 7)), key=lambda signer: signer.peer)


def terms(**keys: float) -> Redundancy:
    return Redundancy(**{"keepers": 3, "needed": 2, "seconds": 1.0, "megabytes": 10, **keys})


class Swarm:
    """Peer 0 is the owner; all are members of the run until a test says otherwise."""

    def __init__(self, chosen: Redundancy, count: int = 5) -> None:
        self.terms, self.network = chosen, MemoryNetwork(latency=0.02)
        self.members = {signer.peer for signer in SIGNERS[:count]}
        self.transports = [self.network.transport(signer) for signer in SIGNERS[:count]]
        self.keepers = [Keeper(one, chosen, lambda: self.members) for one in self.transports]
        self.owner, self.seals = self.transports[0], Seals(SIGNERS[0], RUN)
        self.may_send, self.is_quiet = True, True

    @property
    def peers(self) -> list[PeerId]:
        return [one.peer for one in self.transports]

    def way_out(self) -> WayOut:
        others = lambda: {peer: () for peer in self.peers[1:] if peer in self.members}  # noqa: E731
        return WayOut(
            transport=self.owner, others=others, may_send=lambda: self.may_send, is_quiet=lambda: self.is_quiet
        )

    def giver(self) -> Giver:
        return Giver(self.terms, self.seals, self.way_out(), inline)

    def recovery(self, seals: Seals | None = None, owner: MemoryTransport | None = None) -> Recovery:
        """As of a peer that has its key and nothing else."""
        return Recovery(owner or self.owner, seals or self.seals, lambda: self.peers[1:], inline)

    async def recovered(self) -> Recovered | None:
        return await self.recovery().run(look_for=1.0)

    async def ask(self, number: int, protocol: str, body: bytes, *, asker: int = 0, limit: int = 1 << 20) -> bytes:
        return await request(self.transports[asker], self.peers[number], protocol, body, limit=limit, timeout=5.0)

    def kept(self) -> list[int]:
        """Bytes that each of the others keeps."""
        return [keeper.nbytes for keeper in self.keepers[1:]]


def run(script: Callable[[Swarm], Awaitable[None]], swarm: Swarm, *, dead: Sequence[int] = ()) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            for number, transport in enumerate(swarm.transports):
                if number not in dead:
                    await stack.enter_async_context(transport)
            await script(swarm)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
