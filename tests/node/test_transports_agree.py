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
from decentral.transport.memory import MemoryNetwork
from tests.kit.nodes import small_model
from tests.kit.offering import contribution_of
from tests.kit.patience import PATIENCE
from tests.kit.tables import SYNCHRONOUS_WIRES

STEPS = 4
WIRES_OF_DAEMONS = ("sparseloco", "streaming")
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


async def anchors_of_run(
    manifest: Manifest, identities: list[Identity], transport_of: Callable[[Identity], Transport]
) -> list[bytes]:
    """Digest of the anchor after each outer step of a run whose every round names every peer."""
    peers = len(identities)
    schema = schema_of(small_model(), manifest.outer.fragments)
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
            for number, node in enumerate(sorted(nodes, key=lambda n: n.driver.state.me)):
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
    with anyio.fail_after(PATIENCE):
        while not holds():
            await anyio.sleep(0.02)


DAEMON, NATIVE, PY_LIBP2P = "daemon", "native", "py-libp2p"
SWARMS = [
    *((preset, (DAEMON,) * 3) for preset in WIRES_OF_DAEMONS),
    ("sparseloco", (NATIVE,) * 3),
    ("sparseloco", (DAEMON, NATIVE, PY_LIBP2P)),
    ("diloco", (NATIVE, DAEMON, PY_LIBP2P)),
    ("diloco", (PY_LIBP2P, DAEMON, NATIVE)),
]
LONG = [
    *((preset, (DAEMON,) * 3) for preset in SYNCHRONOUS_WIRES if preset not in WIRES_OF_DAEMONS),
    ("sparseloco", (DAEMON, NATIVE, NATIVE, DAEMON)),
    ("diloco", (NATIVE, DAEMON, DAEMON, NATIVE)),
    ("sparseloco", (NATIVE, DAEMON, DAEMON, NATIVE)),
    ("diloco", (DAEMON, NATIVE, NATIVE, DAEMON)),
    ("diloco", (DAEMON, NATIVE, PY_LIBP2P)),
    ("sparseloco", (NATIVE, DAEMON, PY_LIBP2P)),
    ("sparseloco", (PY_LIBP2P, DAEMON, NATIVE)),
]


@pytest.mark.parametrize(
    ("preset", "kinds"), [*SWARMS, *(pytest.param(*swarm, marks=pytest.mark.long) for swarm in LONG)], ids=str
)
def test_peers_of_any_transports_give_the_anchors_that_memory_gives(
    tmp_path: Path, preset: str, kinds: tuple[str, ...]
) -> None:
    """The first one founds the run."""
    manifest, identities = terms(preset), identities_in(tmp_path, len(kinds))
    memory = in_memory(manifest, identities)

    def of_its_kind(identity: Identity) -> Transport:
        return make_transport(kinds[identities.index(identity)], identity, LOOPBACK)

    assert anyio.run(anchors_of_run, manifest, identities, of_its_kind) == memory


def test_natives_give_the_same_anchors_on_the_other_event_loop(tmp_path: Path) -> None:
    manifest, identities = terms("sparseloco"), identities_in(tmp_path, 3)

    def native(identity: Identity) -> Transport:
        return make_transport(NATIVE, identity, LOOPBACK)

    assert anyio.run(anchors_of_run, manifest, identities, native, backend="trio") == in_memory(manifest, identities)


def in_memory(manifest: Manifest, identities: list[Identity]) -> list[bytes]:
    network = MemoryNetwork()
    return anyio.run(anchors_of_run, manifest, identities, lambda identity: network.transport(identity.signer))


def terms(preset: str) -> Manifest:
    swarm = {"deadline_floor": 20.0, "deadline_ceiling": 40.0, "lease": 10.0, "shrink_after": 20.0}
    return preset_manifest(preset, run={"rounds": 100, "salt": "same"}, swarm=swarm)


def identities_in(folder: Path, count: int) -> list[Identity]:
    made = (Identity.load_or_create(folder / f"{n}.key") for n in range(count))
    return sorted(made, key=lambda identity: identity.peer)
