"""One real peer in a process of its own, as in tests/faults/worker.py, that lies from its third round on."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace

import anyio

from decentral.consensus.chain import Head
from decentral.errors import TransportError
from decentral.node.node import Node
from decentral.rounds.frame_io import CONTROL
from decentral.transport.requests import notify
from decentral.wire import messages as m
from tests.faults import worker
from tests.kit.liars import commit_of, record_after

HONEST_ROUNDS = 3


def lie_of(kind: str, node: Node, head: Head) -> m.Message:
    """What it says at ``head``."""
    alone = record_after(head, next_members=(node.signer.peer,))
    nowhere = m.FrameRef(node.signer.peer, bytes(32), 0, 30, 100, head.outer_step)
    if kind == "prepares":
        state = node.driver.machine.state
        ballot = next(b for b in range(1, 100) if state.leader_of(b) == node.signer.peer)
        return m.Prepare(head.epoch, head.round + 1, ballot + 5 * int(anyio.current_time() * 10))
    changes = {"drops": {}, "ends": {"final": True}, "nowhere": {"frames": (nowhere,)}}[kind]
    return commit_of(replace(alone, **changes), [node.signer])


async def lie(kind: str, node: Node) -> None:
    """Ten times a second, to all others."""
    while True:
        head = node.driver.head
        if head.anchor is not None and head.outer_step >= HONEST_ROUNDS and node.driver.state.is_member:
            for peer in head.members:
                if peer != node.signer.peer:
                    with suppress(TransportError):
                        await notify(node.transport, peer, CONTROL, m.encode(lie_of(kind, node, head)), timeout=2.0)
        await anyio.sleep(0.1)


def main(kind: str, arguments: list[str]) -> None:
    """``KIND`` and what a worker takes."""
    train = worker.train

    async def train_and_lie(node: Node, seed: int) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(train, node, seed)
            group.start_soon(lie, kind, node)

    worker.train = train_and_lie
    worker.run(arguments)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
