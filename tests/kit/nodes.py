"""Real nodes on the memory transport under virtual time, with trainers that pull towards a target each."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
import anyio.abc
import pytest
import torch

from decentral.errors import DiskError
from decentral.flow.waiting import inline
from decentral.manifest import Manifest, preset_manifest
from decentral.node.node import Node, Start
from decentral.optimizers import NO_MOMENTS
from decentral.parameters import Schema, schema_of
from decentral.replica.contribution import Contribution
from decentral.replica.pair_step import GossipStep
from decentral.rounds.gossip import Gossip
from decentral.rounds.local_state import CommittedUpdate, Ledger
from decentral.simulate.virtual_time import run_in_virtual_time
from decentral.transport.memory import MemoryNetwork
from decentral.wire.frames import FrameKind
from decentral.wire.keys import Signer
from tests.kit.offering import contribution_of

STEP = 1.0  # s of virtual time for the inner steps of one round


def signer_of(number: int) -> Signer:
    seed = hashlib.blake2b(b"node" + number.to_bytes(4, "little"), digest_size=32).digest()
    return Signer(seed)


def small_model() -> torch.nn.Module:
    model = torch.nn.Module()
    model.emb = torch.nn.Parameter(torch.zeros(70, 64))
    model.layers = torch.nn.ModuleList([torch.nn.Linear(64, 67) for _ in range(4)])
    return model


def tiny_model() -> torch.nn.Module:
    """For tests that are about who commits what, and not about the values."""
    return torch.nn.Linear(16, 16)


class Teller:
    """Keeps what a node tells."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def happened(self, event: str) -> list[dict[str, Any]]:
        """What was told of each event of that name."""
        return [fields for name, fields in self.events if name == event]


class Member(Teller):
    """A node with a trainer: every ``lab.step`` seconds it contributes a pull towards its own target."""

    def __init__(self, lab: Lab, number: int, founder: bool) -> None:
        super().__init__()
        self.lab, self.number, self.signer = lab, number, signer_of(number)
        self.transport = lab.network.transport(self.signer)
        self.digests: dict[int, str] = {}
        self.log: list[Any] = []
        self.all_updates: list[CommittedUpdate] = []
        anchors = [lab.first_anchor(fragment.numel) for fragment in lab.schema.fragments]
        start = Start(
            manifest=lab.manifest,
            schema=lab.schema,
            anchors=anchors,
            buffers_B=torch.zeros(lab.schema.buffer_numel),
            founder=founder,
            bootstrap=lab.bootstrap(),
        )
        self.node = Node(
            start,
            signer=self.signer,
            transport=self.transport,
            ledger=Ledger(lambda commit, frames: self.log.append(commit), lambda blob: None),
            on_update=self._on_update,
            on_event=self._on_event,
            offload=inline,
        )
        self.scope = anyio.CancelScope()
        self.task: int | None = None  # id of the one in which it lives
        self.steps = 0
        self.idle = False
        self.pull = 0.3
        self.failure: BaseExceptionGroup[DiskError] | None = None
        self.swaps: list[GossipStep] = []

    def _on_event(self, event: str, fields: dict[str, Any]) -> None:
        assert event != "unexpected", f"{fields['what']} failed: {fields['why']}"
        self.events.append((event, fields))

    def _on_update(self, update: CommittedUpdate) -> None:
        self.all_updates.append(update)
        if update.record is not None:
            self.digests[update.record.round] = self.node.replica.digest.hex()

    async def live(self) -> None:
        self.task = anyio.get_current_task().id
        try:
            with self.scope:
                async with self.transport, anyio.create_task_group() as group:
                    await group.start(self.node.run)
                    await self._train()
        except* DiskError as errors:
            self.failure = errors
            self.kill()

    async def _gossip(self, gossip: Gossip) -> None:
        driver = self.node.driver
        while not self.idle:
            await anyio.sleep(self.lab.step)
            fragment = gossip.step % self.lab.manifest.outer.fragments
            anchor = self.node.replica.anchors[fragment]
            method, local = self.node.replica.method, anchor + self.pull * (self.target(fragment) - anchor)
            states = tuple(method.states_sent(anchor, NO_MOMENTS, fragment).values())
            change = method.contribute(anchor, local)
            mine = Contribution(fragment, b"", local, change, 1, 1, tail=self.tail(fragment), states=states)
            self.swaps.append(await gossip.exchange(mine))
        while not driver.head.final:
            if driver.state.pending is None:
                slow = self.node.replica.anchors[0]
                encoded = self.node.replica.merge_codec.encode(slow, None, self.node.replica.shapes(0))
                kind = {"kind": FrameKind.MERGE, "encoded": encoded, "tail": self.tail(0)}
                await driver.contribute(Contribution(0, driver.head.hash, slow, slow, 0, 0, **kind))
            await anyio.sleep(0.1)

    async def _train(self) -> None:
        driver = self.node.driver
        if self.node.gossip is not None:
            await self._gossip(self.node.gossip)
            return
        while True:
            await anyio.sleep(self.lab.step)
            head = driver.head
            if (
                self.idle
                or head.anchor is None
                or head.final
                or driver.state.pending is not None
                or not driver.state.is_member
            ):
                continue
            self.steps += 1
            fragment = head.fragment(self.lab.manifest.outer.fragments)
            steps = self.lab.manifest.inner.steps // self.lab.manifest.outer.fragments
            anchor = self.node.replica.anchors[fragment]
            local = anchor + 0.3 * (self.target(fragment) - anchor)
            given = {"steps": steps, "tail": self.tail(fragment)}
            await driver.contribute(contribution_of(self.node.replica, head, fragment, local, **given))

    def tail(self, fragment: int) -> bytes:
        """Buffers that tell whose they are."""
        tail = self.node.replica.tail
        return tail.pack(torch.full((tail.numel,), float(self.number))) if tail.nbytes(fragment) else b""

    def target(self, fragment: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * self.number + fragment)
        return torch.randn(self.lab.schema.fragments[fragment].numel, generator=generator)

    @property
    def rounds(self) -> int:
        return self.node.driver.head.outer_step

    def kill(self) -> None:
        self.lab.network.kill(self.signer.peer)
        self.scope.cancel()

    async def end(self) -> None:
        """As a process does whose run is over."""
        await self.node.see_others_to_the_end()
        await self.node.leave()
        self.kill()


class Lab:
    """A swarm in memory."""

    def __init__(
        self,
        manifest: Manifest,
        schema: Schema | None = None,
        step: float = STEP,
        make_model: Callable[[], torch.nn.Module] = small_model,
        spread: float = 0.0,
    ) -> None:
        self.manifest, self.make_model, self.step = manifest, make_model, step
        self.spread = spread  # of the values that all peers begin with
        self.schema: Schema = schema_of(make_model(), manifest.outer.fragments) if schema is None else schema
        self.network = MemoryNetwork(latency=0.02)
        self.members: list[Member] = []
        self.group: anyio.abc.TaskGroup | None = None

    def first_anchor(self, numel: int) -> torch.Tensor:
        return self.spread * torch.randn(numel, generator=torch.Generator().manual_seed(numel))

    def bootstrap(self) -> tuple[str, ...]:
        return tuple(address for member in self.members[:1] for address in member.transport.addresses())

    def add(self, *, founder: bool | None = None, kind: type[Member] | None = None) -> Member:
        member = (kind or Member)(self, len(self.members), founder=not self.members if founder is None else founder)
        self.members.append(member)
        assert self.group is not None
        self.group.start_soon(member.live)
        return member

    async def start(self, peers: int | Sequence[type[Member] | None], rounds: int = 0) -> None:
        """So many peers, or one of each kind, that are all members and have made so many rounds."""
        for kind in [None] * peers if isinstance(peers, int) else peers:
            self.add(kind=kind)
        await self.all_members()
        if rounds:
            await self.rounds(rounds)

    async def rest(self) -> None:
        """Nobody trains, and nothing is in flight."""
        for member in self.alive():
            member.idle = True
        await self.until(lambda: all(member.node.driver.state.pending is None for member in self.alive()))

    async def one_head(self) -> None:
        """All stand where all others do."""
        await self.until(lambda: len({member.node.driver.head.hash for member in self.alive()}) == 1)

    def alive(self) -> list[Member]:
        return [member for member in self.members if not member.scope.cancel_called]

    def cut(self, some: Sequence[Member], others: Sequence[Member]) -> None:
        """Partition the swarm; ``heal`` undoes it."""
        for a in some:
            for b in others:
                self.network.cut(a.signer.peer, b.signer.peer)

    def heal(self, some: Sequence[Member], others: Sequence[Member]) -> None:
        for a in some:
            for b in others:
                self.network.heal(a.signer.peer, b.signer.peer)

    async def until(self, holds: Callable[[], bool], limit: float = 300.0) -> None:
        with anyio.fail_after(limit):
            while not holds():
                await anyio.sleep(0.1)

    async def reach(self, members: Sequence[Member], rounds: int, limit: float = 300.0) -> None:
        await self.until(lambda: all(member.rounds >= rounds for member in members), limit)

    async def all_members(self) -> None:
        await self.until(lambda: all(len(m.node.driver.head.members) == len(self.alive()) for m in self.alive()))

    async def rounds(self, count: int) -> None:
        await self.reach(self.alive(), max(member.rounds for member in self.alive()) + count)

    def check_equal(self) -> None:
        """Peers that applied the same round hold the same bits."""
        seen: dict[int, str] = {}
        for member in self.members:
            for round_, digest in member.digests.items():
                assert seen.setdefault(round_, digest) == digest, f"round {round_} differs between peers"


def small_terms(preset: str, **swarm: Any) -> Manifest:
    limits = {
        "deadline_floor": 1.0,
        "deadline_ceiling": 8.0,
        "lease": 3.0,
        "shrink_after": 6.0,
        "min_peers": 1,
        **swarm,
    }
    return preset_manifest(preset, run={"rounds": 1000, "salt": "test", "seed": 0}, swarm=limits)


@pytest.fixture
def terms() -> Callable[..., Manifest]:
    return small_terms


def run_in_lab(manifest: Manifest, script: Callable[[Lab], Awaitable[None]], **given: Any) -> None:
    async def main() -> None:
        lab = Lab(manifest, **given)
        async with anyio.create_task_group() as group:
            lab.group = group
            await script(lab)
            group.cancel_scope.cancel()

    run_in_virtual_time(main, seed=0)


@pytest.fixture
def run_lab() -> Callable[..., None]:
    return run_in_lab


def scene(
    terms: str | Callable[..., Manifest] = "sparseloco",
    *,
    peers: int | Sequence[type[Member] | None] = 0,
    rounds: int = 0,
    **given: Any,
) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Makes a test of a coroutine: it is called with a lab whose ``peers`` are members and have made ``rounds``.

    ``terms``: a preset (the test's own parameter ``preset`` goes before it), or what makes a manifest of those
    parameters of the test that it names. ``given``: what the lab is told beside.
    """

    def as_test(script: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        asked = inspect.signature(script)
        of_terms = inspect.signature(terms).parameters if callable(terms) else {}

        @functools.wraps(script)
        def test(**told: Any) -> None:
            async def whole(lab: Lab) -> None:
                if peers:
                    await lab.start(peers, rounds)
                await script(lab, **told)

            if isinstance(terms, str):
                manifest = small_terms(told.get("preset", terms))
            else:
                manifest = terms(**{name: told[name] for name in of_terms if name in told})
            run_in_lab(manifest, whole, **given)

        test.__signature__ = asked.replace(parameters=list(asked.parameters.values())[1:])  # type: ignore[attr-defined]
        return test

    return as_test
