"""An owner and its keepers on a network in memory, under virtual time."""

from __future__ import annotations

from contextlib import AsyncExitStack

import numpy as np

from decentral.flow.waiting import inline
from decentral.manifest import Redundancy
from decentral.redundancy.giver import GivenState, Giver, WayOut
from decentral.redundancy.keeper import Keeper
from decentral.redundancy.pieces import CHUNK_NBYTES, Seals
from decentral.redundancy.recovery import Recovery
from decentral.transport.memory import MemoryNetwork, MemoryTransport
from decentral.transport.requests import request
from decentral.wire.keys import PeerId, Signer

RUN = bytes([0xAA] * 32)
STATE, NEWER = (np.random.default_rng(seed).bytes(5 * CHUNK_NBYTES + 77) for seed in range(2))
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

    async def __aenter__(self) -> Swarm:
        self._exits = AsyncExitStack()
        for transport in self.transports:
            await self._exits.enter_async_context(transport)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._exits.aclose()

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

    async def give(self, state: bytes = STATE, round_: int = 7) -> GivenState:
        given = await self.giver().give(state, round_)
        assert given is not None
        return given

    async def recovered(self) -> tuple[bytes, int] | None:
        """The state that comes back, and its round."""
        found = await self.recovery().run(look_for=1.0)
        return None if found is None else (found.state, found.round)

    async def ask(self, number: int, protocol: str, body: bytes, *, asker: int = 0, limit: int = 1 << 20) -> bytes:
        return await request(self.transports[asker], self.peers[number], protocol, body, limit=limit, timeout=5.0)

    def kept(self) -> list[int]:
        """Bytes that each of the others keeps."""
        return [keeper.nbytes for keeper in self.keepers[1:]]
