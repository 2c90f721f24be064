"""What a join and a replay cost: real nodes, virtual time, links with a rate.

    python experiments/catchup/measure.py join --uplinks 20 20 20 --downlink 50
    python experiments/catchup/measure.py join --uplinks 20 --downlink 20 --idle --as-they-are
    python experiments/catchup/measure.py replay --peers 4 --rounds 5

The model is one tensor, of normal values or of a checkpoint's anchors over and over (``--weights``); donors train on
while they serve, and send their frames through the same uplinks. With ``--as-they-are`` they do not pack chunks.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import torch
import trio
import trio._core._run as scheduler
import trio.testing
from safetensors.torch import load_file

from decentral.flow.waiting import inline
from decentral.manifest import Manifest, preset_manifest
from decentral.node.node import Node, Start
from decentral.parameters import Schema, schema_of
from decentral.replica.contribution import Contribution
from decentral.rounds.local_state import Ledger
from decentral.rounds.snapshots import PACKED
from decentral.transport.memory import MemoryNetwork
from decentral.wire.keys import Signer

MBIT = 125_000.0  # bytes/s


def one_tensor(numel: int) -> Schema:
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(numel // 1000, 1000))
    return schema_of(model, 1)


def weights_of(path: Path | None, numel: int) -> torch.Tensor:
    if path is None:
        return 0.02 * torch.randn(numel, generator=torch.Generator().manual_seed(0))
    found = load_file(path)
    anchors = torch.cat([found[name] for name in sorted(found) if name.startswith("anchor/")])
    return anchors.repeat(-(-numel // anchors.numel()))[:numel].clone()


class Peer:
    """A node, and a trainer that contributes noise every ``step`` seconds."""

    def __init__(self, swarm: Swarm, number: int) -> None:
        signer = Signer(bytes([number + 1]) * 32)
        self.swarm, self.number = swarm, number
        self.transport = swarm.network.transport(signer)
        addresses = tuple(swarm.peers[0].transport.addresses()) if swarm.peers else ()
        start = Start(
            manifest=swarm.manifest,
            schema=swarm.schema,
            anchors=[swarm.weights.clone()],
            founder=not swarm.peers,
            bootstrap=addresses,
        )
        self.node = Node(
            start,
            signer=signer,
            transport=self.transport,
            ledger=Ledger(lambda commit, frames: None, lambda blob: None),
            on_update=lambda update: None,
            on_event=self.on_event,
            offload=inline,
        )
        self.events: list[str] = []

    def on_event(self, event: str, fields: dict[str, object]) -> None:
        self.events.append(event)

    @property
    def id(self) -> bytes:
        return self.transport.peer

    @property
    def nbytes(self) -> int:
        return self.transport.traffic.total.received + self.transport.traffic.total.sent

    async def live(self) -> None:
        async with self.transport, anyio.create_task_group() as group:
            await group.start(self.node.run)
            generator = torch.Generator().manual_seed(self.number)
            while True:
                await anyio.sleep(self.swarm.step)
                driver, head = self.node.driver, self.node.driver.head
                if (
                    self.swarm.idle
                    or head.anchor is None
                    or driver.state.pending is not None
                    or not driver.state.is_member
                ):
                    continue
                anchor = self.node.replica.anchors[0]
                gradient = torch.randn(anchor.numel(), generator=generator)
                await driver.contribute(Contribution(0, head.hash, anchor - gradient, gradient, 1, 1))


class Swarm:
    def __init__(self, manifest: Manifest, weights: torch.Tensor, options: argparse.Namespace) -> None:
        self.manifest, self.schema, self.step = manifest, one_tensor(weights.numel()), options.step
        self.weights, self.packs = weights, not options.as_they_are
        self.network = MemoryNetwork(latency=options.latency)
        self.peers: list[Peer] = []
        self.idle = False

    def add(self, nursery: trio.Nursery) -> Peer:
        self.peers.append(Peer(self, len(self.peers)))
        if not self.packs:
            del self.peers[-1].transport.services.handlers[PACKED]
        nursery.start_soon(self.peers[-1].live)
        return self.peers[-1]

    async def until(self, holds: Callable[[], bool], limit: float = 2000.0) -> None:
        with trio.fail_after(limit):
            while not holds():
                await trio.sleep(0.01)

    async def gather(self, nursery: trio.Nursery, count: int) -> None:
        for _ in range(count):
            self.add(nursery)
        await self.until(lambda: all(len(p.node.driver.head.members) == count for p in self.peers))
        await self.until(lambda: all(p.node.driver.head.outer_step for p in self.peers))


async def join(swarm: Swarm, options: argparse.Namespace, nursery: trio.Nursery) -> None:
    await swarm.gather(nursery, len(options.uplinks))
    for peer, uplink in zip(swarm.peers, options.uplinks, strict=True):
        swarm.network.set_uplink(peer.id, uplink * MBIT)
    swarm.idle = options.idle
    began, first = trio.current_time(), swarm.peers[0].node.driver.head
    joiner = swarm.add(nursery)
    swarm.network.set_downlink(joiner.id, options.downlink * MBIT)
    if options.stall is not None:
        nursery.start_soon(stall, swarm, options.stall)
    await swarm.until(joiner.node.ready.is_set)
    took, received = trio.current_time() - began, joiner.transport.traffic.total.received
    size = 4 * swarm.schema.fragments[0].numel
    bound = size / (min(sum(options.uplinks), options.downlink) * MBIT)
    commits = swarm.peers[0].node.driver.head.round - first.round
    await swarm.until(lambda: joiner.node.driver.state.is_member)
    print(
        f"join: {size / 1e6:.1f} MB, up {options.uplinks}, down {options.downlink:g} Mbit/s, "
        f"{1e3 * options.latency:g} ms: {took:.2f} s, {took / bound:.3f} x bound, "
        f"received {received / size:.3f} x size, {commits} commits meanwhile, "
        f"member after {trio.current_time() - began:.2f} s, {joiner.events}"
    )


async def stall(swarm: Swarm, after: float) -> None:
    """One donor's uplink all but ends."""
    await trio.sleep(after)
    swarm.network.set_uplink(swarm.peers[1].id, 1000.0)


async def replay(swarm: Swarm, options: argparse.Namespace, nursery: trio.Nursery) -> None:
    await swarm.gather(nursery, options.peers)
    *others, away = swarm.peers
    for peer in others:
        swarm.network.cut(away.id, peer.id)
    goal = away.node.driver.head.outer_step + options.rounds
    await swarm.until(lambda: all(peer.node.driver.head.outer_step >= goal for peer in others))
    swarm.idle = True
    await trio.sleep(5.0)
    behind, before, began = (
        others[0].node.driver.head.outer_step - goal + options.rounds,
        away.nbytes,
        trio.current_time(),
    )
    for peer in others:
        swarm.network.heal(away.id, peer.id)
    await swarm.until(lambda: away.node.driver.head.hash == others[0].node.driver.head.hash)
    size, nbytes, took = 4 * swarm.schema.fragments[0].numel, away.nbytes - before, trio.current_time() - began
    assert away.node.replica.digest == others[0].node.replica.digest
    print(
        f"replay: {options.peers} peers, {behind} rounds, {nbytes} of {size} bytes, {100 * nbytes / size:.2f} %, "
        f"{took:.1f} s, {away.events}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["join", "replay"])
    parser.add_argument("--numel", type=int, default=25_000_000)
    parser.add_argument("--uplinks", type=float, nargs="+", default=[20.0, 20.0, 20.0], help="Mbit/s of each donor")
    parser.add_argument("--downlink", type=float, default=50.0, help="Mbit/s of the joiner")
    parser.add_argument("--latency", type=float, default=0.04, help="s, one way")
    parser.add_argument("--step", type=float, default=15.0, help="s of training per round")
    parser.add_argument("--idle", action="store_true", help="donors do not train while they serve")
    parser.add_argument(
        "--as-they-are", action="store_true", help="donors send chunks as they did before they packed them"
    )
    parser.add_argument("--weights", type=Path, help="tensors.safetensors of a checkpoint")
    parser.add_argument("--preset", default="sparseloco", help="diloco: a momentum is fetched, too")
    parser.add_argument("--stall", type=float, help="s after which one donor's uplink all but ends")
    parser.add_argument("--peers", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    scheduler._ALLOW_DETERMINISTIC_SCHEDULING, scheduler._r = True, random.Random(0)  # trio's switch for simulations
    limits = {"lease": 15.0, "shrink_after": 3600.0, "deadline_floor": 2.0, "deadline_ceiling": 30.0, "min_peers": 1}
    manifest = preset_manifest(options.preset, run={"rounds": 1000, "salt": "cost", "seed": 0}, swarm=limits)
    weights = weights_of(options.weights, options.numel)
    script: Callable[[Swarm, argparse.Namespace, trio.Nursery], Awaitable[None]] = (
        join if options.what == "join" else replay
    )

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            await script(Swarm(manifest, weights, options), options, nursery)
            nursery.cancel_scope.cancel()

    began = time.perf_counter()
    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))
    print(f"{time.perf_counter() - began:.0f} s of real time")


if __name__ == "__main__":
    main()
