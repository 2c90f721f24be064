"""Chunks over loopback, where the processor is the limit: packed, plain, and as the joiner chooses.

    OMP_NUM_THREADS=1 python -m experiments.catchup.loopback

Both ends in one process on the native transport, 64 MB of normal values.
"""

from __future__ import annotations

import time

import anyio
import torch
from decentral.exchange.stripes import fetch_chunks

from decentral.rounds.chunks import Chunks, Gain
from decentral.rounds.donor import ANY_FORM, PACKED
from decentral.state.assembler import Assembler
from decentral.state.chunk_form import to_form
from decentral.state.snapshot import Snapshot
from decentral.transport.native import NativeTransport
from decentral.transport.requests import serve_requests
from decentral.wire.keys import Signer

SNAPSHOT = Snapshot({"anchor/0": 0.02 * torch.randn(16_000_000)}, {})
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


async def fetch(always: bool | None) -> None:
    donor, joiner = (NativeTransport(Signer.generate(), listen=LOOPBACK) for _ in range(2))
    asked = [0, 0]  # plain, packed

    async def answer(peer: bytes, data: bytes) -> bytes:
        _, number, forms = ANY_FORM.unpack(data)
        asked[forms] += 1
        return to_form(SNAPSHOT.chunk(number), forms)

    serve_requests(donor, PACKED, answer, limit=ANY_FORM.size)
    async with donor, joiner:
        await joiner.connect(donor.peer, donor.addresses())
        chunks = Chunks(joiner, SNAPSHOT.index, 30.0)
        if always is not None:
            chunks.gain = Always(always)
        began = time.perf_counter()
        await fetch_chunks(Assembler(SNAPSHOT.index), chunks.ask, lambda: [donor.peer], lambda peer, error: None)
        print(f"packed: {always}: {64 / (time.perf_counter() - began):.0f} MB/s, asked for {asked}")


class Always(Gain):
    def __init__(self, packed: bool) -> None:
        super().__init__(0.0)
        self.packed = packed

    def pays(self, now: float) -> bool:
        return self.packed


if __name__ == "__main__":
    for choice in (False, True, None) * 2:
        anyio.run(fetch, choice)
