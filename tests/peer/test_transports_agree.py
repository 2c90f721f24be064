"""The same run over memory and over real daemons: not one bit of the anchors may depend on what carried them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
import torch

from decentral.exchange.offload import in_thread
from decentral.manifest import Manifest, preset_manifest
from decentral.parameters import schema_of
from decentral.peer.node import Node, Start
from decentral.rounds.contribution import Contribution
from decentral.rounds.driver import Advance, Ledger
from decentral.swarm.identity import Identity
from decentral.transport import Transport
from decentral.transport.daemon import DaemonTransport
from decentral.transport.memory import MemoryNetwork

PEERS, STEPS = 3, 4


def make_model() -> torch.nn.Module:
    model = torch.nn.Module()
    model.emb = torch.nn.Parameter(torch.zeros(70, 64))
    model.layers = torch.nn.ModuleList([torch.nn.Linear(64, 67) for _ in range(4)])
    return model


async def anchors_of_run(
    manifest: Manifest, identities: list[Identity], make_transport: Callable[[Identity], Transport]
) -> list[bytes]:
    """Digest of the anchor after each outer step of a run whose every round names every peer."""
    schema = schema_of(make_model(), manifest.outer.fragments)
    found: dict[int, set[tuple[bytes, int]]] = {}
    nodes: list[Node] = []

    async def live(identity: Identity, bootstrap: tuple[str, ...]) -> None:
        def on_advance(advance: Advance) -> None:
            record = advance.record
            if record is not None and advance.after_N is not None:
                named = len(record.contributors or record.frames)
                found.setdefault(record.outer_step, set()).add((node.replica.digest, named))

        transport = make_transport(identity)
        anchors = [torch.zeros(fragment.numel) for fragment in schema.fragments]
        start = Start(manifest=manifest, schema=schema, anchors=anchors, founder=not bootstrap, bootstrap=bootstrap)
        node = Node(
            start,
            signer=identity.signer,
            transport=transport,
            ledger=Ledger(lambda commit, frames: None, lambda blob: None),
            on_advance=on_advance,
            on_event=lambda event, fields: None,
            offload=in_thread,
        )
        async with transport, anyio.create_task_group() as group:
            await group.start(node.run)
            nodes.append(node)
            await anyio.sleep_forever()

    async with anyio.create_task_group() as group:
        group.start_soon(live, identities[0], ())
        await until(lambda: len(nodes) == 1)
        for identity in identities[1:]:
            group.start_soon(live, identity, nodes[0].transport.addresses())
        await until(lambda: len(nodes) == PEERS and all(len(n.driver.head.members) == PEERS for n in nodes))
        for step in range(STEPS):
            await until(lambda step=step: all(ready(node, step) for node in nodes))
            for number, node in enumerate(sorted(nodes, key=lambda n: n.driver.me)):
                await node.driver.contribute(contribution(node, number))
        await until(
            lambda: len(found.get(STEPS - 1, ())) == 1 and all(n.driver.head.outer_step == STEPS for n in nodes)
        )
        group.cancel_scope.cancel()
    assert all(len(outcomes) == 1 for outcomes in found.values()), "peers differ"
    assert all(named == PEERS for outcomes in found.values() for _, named in outcomes)
    return [next(iter(found[step]))[0] for step in range(STEPS)]


def ready(node: Node, step: int) -> bool:
    head = node.driver.head
    return head.outer_step == step and head.anchor is not None


def contribution(node: Node, number: int) -> Contribution:
    head = node.driver.head
    fragment = head.fragment(len(node.start.schema.fragments))
    anchor = node.replica.anchors[fragment]
    generator = torch.Generator().manual_seed(100 * number + head.outer_step)
    local = anchor + torch.randn(anchor.numel(), generator=generator)
    return Contribution(fragment, head.hash, local, anchor - local, 1, 1)


async def until(holds: Callable[[], bool]) -> None:
    with anyio.fail_after(60):
        while not holds():
            await anyio.sleep(0.02)


@pytest.mark.parametrize("preset", ["sparseloco", "diloco", "streaming"])
def test_memory_and_daemon_give_the_same_anchors(tmp_path: Path, preset: str) -> None:
    swarm = {"deadline_floor": 20.0, "deadline_ceiling": 40.0, "lease": 10.0, "shrink_after": 20.0}
    manifest = preset_manifest(preset, run={"rounds": 100, "salt": "same"}, swarm=swarm)
    identities = sorted(
        (Identity.load_or_create(tmp_path / f"{n}.key") for n in range(PEERS)), key=lambda identity: identity.peer
    )
    network = MemoryNetwork()
    memory = anyio.run(anchors_of_run, manifest, identities, lambda i: network.transport(i.signer))
    daemon = anyio.run(
        anchors_of_run, manifest, identities, lambda i: DaemonTransport(i, listen=("/ip4/127.0.0.1/tcp/0",))
    )
    assert memory == daemon
