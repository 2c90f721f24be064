"""The same run over memory, real daemons, and daemons beside natives and py-libp2p: not one bit of the anchors may
depend on what carried them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
import torch

from decentral.flow.waiting import in_thread
from decentral.manifest import Manifest, preset_manifest
from decentral.node.node import Node, Start
from decentral.parameters import schema_of
from decentral.replica.contribution import Contribution
from decentral.rounds.local_state import CommittedUpdate, Ledger
from decentral.swarm.identity import Identity
from decentral.transport import Transport
from decentral.transport.choice import make_transport
from decentral.transport.daemon.transport import DaemonTransport
from decentral.transport.memory import MemoryNetwork
from decentral.transport.native.transport import NativeTransport
from tests.kit.offering import contribution_of
from tests.kit.tables import DOSED_WIRES

PEERS, STEPS = 3, 4
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


def make_model() -> torch.nn.Module:
    model = torch.nn.Module()
    model.emb = torch.nn.Parameter(torch.zeros(70, 64))
    model.layers = torch.nn.ModuleList([torch.nn.Linear(64, 67) for _ in range(4)])
    return model


async def anchors_of_run(
    manifest: Manifest, identities: list[Identity], transport_of: Callable[[Identity], Transport]
) -> list[bytes]:
    """Digest of the anchor after each outer step of a run whose every round names every peer."""
    peers = len(identities)
    schema = schema_of(make_model(), manifest.outer.fragments)
    found: dict[int, set[tuple[bytes, int]]] = {}
    nodes: list[Node] = []

    async def live(identity: Identity, bootstrap: tuple[str, ...]) -> None:
        def on_update(update: CommittedUpdate) -> None:
            record = update.record
            if record is not None and update.after_N is not None:
                named = len(record.contributors or record.frames)
                found.setdefault(record.outer_step, set()).add((node.replica.digest, named))

        transport = transport_of(identity)
        anchors = [torch.zeros(fragment.numel) for fragment in schema.fragments]
        start = Start(manifest=manifest, schema=schema, anchors=anchors, founder=not bootstrap, bootstrap=bootstrap)
        node = Node(
            start,
            signer=identity.signer,
            transport=transport,
            ledger=Ledger(lambda commit, frames: None, lambda blob: None),
            on_update=on_update,
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
        await until(lambda: len(nodes) == peers and all(len(n.driver.head.members) == peers for n in nodes))
        for step in range(STEPS):
            await until(lambda step=step: all(ready(node, step) for node in nodes))
            for number, node in enumerate(sorted(nodes, key=lambda n: n.driver.me)):
                await node.driver.contribute(contribution(node, number))
        await until(
            lambda: len(found.get(STEPS - 1, ())) == 1 and all(n.driver.head.outer_step == STEPS for n in nodes)
        )
        group.cancel_scope.cancel()
    assert all(len(outcomes) == 1 for outcomes in found.values()), "peers differ"
    assert all(named == peers for outcomes in found.values() for _, named in outcomes)
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
    return contribution_of(node.replica, head, fragment, local, steps=1)


async def until(holds: Callable[[], bool]) -> None:
    with anyio.fail_after(60):
        while not holds():
            await anyio.sleep(0.02)


@pytest.mark.parametrize("preset", DOSED_WIRES)
def test_memory_and_daemon_give_the_same_anchors(tmp_path: Path, preset: str) -> None:
    manifest, identities = terms(preset), identities_in(tmp_path, PEERS)
    network = MemoryNetwork()
    memory = anyio.run(anchors_of_run, manifest, identities, lambda i: network.transport(i.signer))
    daemon = anyio.run(anchors_of_run, manifest, identities, daemon_transport)
    assert memory == daemon


@pytest.mark.parametrize(
    ("preset", "founder"),
    [
        ("sparseloco", "daemon"),
        ("diloco", "native"),
        pytest.param("sparseloco", "native", marks=pytest.mark.long),
        pytest.param("diloco", "daemon", marks=pytest.mark.long),
    ],
)
def test_two_daemons_and_two_natives_train_as_one_swarm(tmp_path: Path, preset: str, founder: str) -> None:
    manifest, identities = terms(preset), identities_in(tmp_path, 4)
    daemons = identities[:1] + identities[3:] if founder == "daemon" else identities[1:3]
    network = MemoryNetwork()
    memory = anyio.run(anchors_of_run, manifest, identities, lambda i: network.transport(i.signer))

    def either(identity: Identity) -> Transport:
        return daemon_transport(identity) if identity in daemons else native_transport(identity)

    assert anyio.run(anchors_of_run, manifest, identities, either) == memory


@pytest.mark.parametrize(
    ("preset", "founder"),
    [
        ("sparseloco", "daemon"),
        ("diloco", "native"),
        ("diloco", "py-libp2p"),
        pytest.param("diloco", "daemon", marks=pytest.mark.long),
        pytest.param("sparseloco", "native", marks=pytest.mark.long),
        pytest.param("sparseloco", "py-libp2p", marks=pytest.mark.long),
    ],
)
def test_a_daemon_a_native_and_a_py_libp2p_peer_train_as_one_swarm(tmp_path: Path, preset: str, founder: str) -> None:
    manifest, identities = terms(preset), identities_in(tmp_path, 3)
    kinds = sorted(("daemon", "native", "py-libp2p"), key=lambda kind: kind != founder)
    network = MemoryNetwork()
    memory = anyio.run(anchors_of_run, manifest, identities, lambda i: network.transport(i.signer))

    def one_of_each(identity: Identity) -> Transport:
        return make_transport(kinds[identities.index(identity)], identity, LOOPBACK)

    assert anyio.run(anchors_of_run, manifest, identities, one_of_each) == memory


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_natives_alone_give_the_same_anchors_on_both_event_loops(tmp_path: Path, backend: str) -> None:
    manifest, identities = terms("sparseloco"), identities_in(tmp_path, PEERS)
    network = MemoryNetwork()
    memory = anyio.run(anchors_of_run, manifest, identities, lambda i: network.transport(i.signer))
    assert anyio.run(anchors_of_run, manifest, identities, native_transport, backend=backend) == memory


def terms(preset: str) -> Manifest:
    swarm = {"deadline_floor": 20.0, "deadline_ceiling": 40.0, "lease": 10.0, "shrink_after": 20.0}
    return preset_manifest(preset, run={"rounds": 100, "salt": "same"}, swarm=swarm)


def identities_in(folder: Path, count: int) -> list[Identity]:
    made = (Identity.load_or_create(folder / f"{n}.key") for n in range(count))
    return sorted(made, key=lambda identity: identity.peer)


def daemon_transport(identity: Identity) -> Transport:
    return DaemonTransport(identity, listen=LOOPBACK)


def native_transport(identity: Identity) -> Transport:
    return NativeTransport(identity.signer, listen=LOOPBACK)
