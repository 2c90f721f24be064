"""What members keep for each other, for AdamW's state of 10 million parameters: bytes, seconds, MB/s.

    python -m experiments.redundancy.measured [--parameters 10e6] [--keepers 3] [--needed 2]

Cutting and sealing in this thread; giving and getting back over four native transports on loopback, in one process.
"""

from __future__ import annotations

import argparse
import time
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import numpy as np
import torch

from decentral.flow.waiting import in_thread
from decentral.manifest import Redundancy
from decentral.redundancy.giver import Giver, WayOut, pack_state, unpack_state
from decentral.redundancy.keeper import Keeper
from decentral.redundancy.pieces import CHUNK_NBYTES, Label, Seals, join_pieces, pieces_of
from decentral.redundancy.recovery import Recovery
from decentral.state.checkpoint import flatten
from decentral.swarm.identity import Identity
from decentral.transport.choice import make_transport

RUN = bytes(32)


def timed(what: str, nbytes: int, work):
    began, before = time.perf_counter(), time.process_time()
    found = work()
    seconds, cpu = time.perf_counter() - began, time.process_time() - before
    print(f"{what:<28}{seconds:7.3f} s  {cpu:7.3f} s of processor, {nbytes / 1e6 / cpu:8.0f} MB a second of it")
    return found


def adamw(parameters: int) -> bytes:
    model = torch.nn.Linear(parameters // 1000, 1000, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model.weight.grad = torch.randn_like(model.weight)
    optimizer.step()
    tensors, document = flatten({"optimizer": optimizer.state_dict()}, "training")
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    return timed("pack", nbytes, lambda: pack_state(tensors, document))


async def through_transports(state: bytes, terms: Redundancy) -> None:
    with TemporaryDirectory() as folder:
        identities = [Identity.load_or_create(Path(folder) / str(n)) for n in range(terms.keepers + 1)]
        transports = [make_transport("native", one, ("/ip4/127.0.0.1/tcp/0",)) for one in identities]
        peers = {one.peer for one in identities}
        for transport in transports:
            Keeper(transport, terms, lambda: peers)
        owner, seals = transports[0], Seals(identities[0].signer, RUN)
        async with AsyncExitStack() as stack:
            for transport in transports:
                await stack.enter_async_context(transport)
            for other in transports[1:]:
                await owner.connect(other.peer, other.addresses())
            others = {other.peer: other.addresses() for other in transports[1:]}
            way_out = WayOut(transport=owner, others=lambda: others)
            before = time.process_time()
            given = await Giver(terms, seals, way_out, in_thread).give(state, 7)
            assert given is not None
            assert not given.why, given.why
            cpu = time.process_time() - before
            print(f"{'give':<28}{given.seconds:7.3f} s  {cpu:7.3f} s of processor, {given.nbytes} bytes sent")
            began, before = time.perf_counter(), time.process_time()
            found = await Recovery(owner, seals, lambda: list(others), in_thread).run()
            assert found is not None
            assert found.state == state
            seconds, cpu = time.perf_counter() - began, time.process_time() - before
            print(
                f"{'get back':<28}{seconds:7.3f} s  {cpu:7.3f} s of processor  {len(state) / 1e6 / seconds:8.0f} MB/s"
            )


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--parameters", type=float, default=10e6)
    options.add_argument("--keepers", type=int, default=3)
    options.add_argument("--needed", type=int, default=2)
    given = options.parse_args()
    terms = Redundancy(keepers=given.keepers, needed=given.needed, megabytes=4000)
    state = adamw(int(given.parameters))
    plan = Label(7, bytes(16), 0, terms.keepers, terms.needed, len(state))
    print(f"state {len(state)} bytes, piece {plan.piece_nbytes}, in {plan.stripes} stripes")
    row_KW = np.random.default_rng(0).integers(0, 256, (terms.needed, CHUNK_NBYTES), dtype=np.uint8)
    piece_nW = pieces_of(row_KW, terms.keepers)  # and compile
    last = {number: piece_nW[number] for number in range(terms.keepers - terms.needed, terms.keepers)}
    laps = range(100)
    timed("code", row_KW.nbytes * 100, lambda: [pieces_of(row_KW, terms.keepers) for _ in laps])
    timed("decode, the first ones lost", row_KW.nbytes * 100, lambda: [join_pieces(last, terms.needed) for _ in laps])
    seals, view = Seals(Identity.load_or_create(Path(TemporaryDirectory().name) / "key").signer, RUN), memoryview(state)
    stripes = timed("code and seal", len(state), lambda: [seals.chunks(plan, s, view) for s in range(plan.stripes)])
    labels = [seals.label(plan, number) for number in range(terms.keepers)]

    def opened() -> bytes:
        lost = range(terms.keepers - terms.needed, terms.keepers)
        whole = [
            seals.stripe(plan, {number: seals.open_chunk(labels[number], s, stripes[s][number]) for number in lost})
            for s in range(plan.stripes)
        ]
        return b"".join(whole)[: len(state)]

    assert timed("open and decode", len(state), opened) == state
    timed("unpack", len(state), lambda: unpack_state(state))
    anyio.run(through_transports, state, terms)


if __name__ == "__main__":
    main()
