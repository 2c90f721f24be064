"""Strangers, each with all the silent streams and withheld bodies that it may have: rounds go on beside them."""

from __future__ import annotations

import hashlib
from contextlib import suppress

import anyio

from decentral.dissemination.broadcast import PUSH
from decentral.errors import TransportError
from decentral.flow.budget import Budget, Limits
from decentral.node.node import RunMembers
from decentral.wire.keys import Signer
from tests.kit.nodes import tiny_model

SYBILS, STREAMS = 4, 8
LIMITS = Limits(peer_streams=STREAMS, total_streams=16, outsider_streams=8)  # fewer than they ask for, and all faster
WITHHELD = (64).to_bytes(4, "little")


async def pester(network, number, victim) -> None:
    """Hold streams to ``victim`` that say how long their body is, and then nothing; again whenever they are closed."""
    seed = hashlib.blake2b(b"sybil" + number.to_bytes(4, "little"), digest_size=32).digest()
    sybil = network.transport(Signer(seed))

    async def hold() -> None:
        while True:
            with suppress(TransportError):
                stream = await sybil.open(victim.peer, PUSH)
                await stream.send(WITHHELD)
                await stream.receive_exactly(1)
            await anyio.sleep(2.0)

    async with sybil, anyio.create_task_group() as nursery:
        await sybil.connect(victim.peer, victim.addresses())
        for _ in range(STREAMS):
            nursery.start_soon(hold)


def test_rounds_go_on_and_a_newcomer_is_let_in(run_lab, terms):
    async def script(lab):
        for _ in range(3):
            lab.add()
        await lab.all_members()
        began = anyio.current_time()
        await lab.rounds(5)
        quiet = anyio.current_time() - began
        beset = lab.members[0].transport
        beset.budget = Budget(LIMITS)
        beset.budget.prefer(RunMembers(lab.members[0].node.driver))
        for number in range(SYBILS):
            lab.group.start_soon(pester, lab.network, number, beset)
        await anyio.sleep(2.0)
        began = anyio.current_time()
        await lab.rounds(5)
        assert anyio.current_time() - began <= 1.5 * quiet
        assert all(len(commit.record.frames) == 3 for commit in lab.members[0].log[-4:])
        lab.add()  # invited by the one that they beset
        await lab.until(lambda: len(lab.members[0].node.driver.head.members) == 4, limit=60.0)
        lab.check_equal()

    run_lab(terms("sparseloco"), script, make_model=tiny_model)
