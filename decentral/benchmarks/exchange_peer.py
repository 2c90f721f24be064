"""A peer of the exchange benchmark, a process of its own: contributes when told to, tells when the commit is applied.

python -m decentral.benchmarks.exchange_peer '{"folder": ..., "number": 0, ...}'

Hears and says one JSON object a line, on stdin and stdout. The peer is the real one: daemon, directory, rounds,
signatures, digests. Only its training is left out, and its disk.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import psutil
import torch

from decentral.consensus.chain import Head
from decentral.flow.waiting import Changes
from decentral.manifest import Manifest, parse_manifest
from decentral.node.node import Node, Start, throttle
from decentral.replica.contribution import Contribution
from decentral.rounds.gossip import Gossip
from decentral.rounds.local_state import CommittedUpdate, Ledger
from decentral.swarm.identity import Identity
from decentral.tensors.ops import difference
from decentral.training.live_model import LiveModel
from decentral.training.schedule import make_schedule
from decentral.transport.choice import make_transport
from decentral.transport.throttle import Caps


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSeat:
    """Arguments that a peer of the benchmark gets on its command line."""

    folder: str
    number: int
    manifest: str
    rows: int  # of 1,024 values
    many: bool = False  # tensors: those of a language model, and not one
    listen: Sequence[str] = ("/ip4/127.0.0.1/tcp/0",)
    bootstrap: Sequence[str] = ()
    up: float | None = None  # caps, bytes/s
    down: float | None = None
    transport: str | None = None
    computing: float = 0.0  # s of inner steps before each contribution
    overlap: bool = False  # the next ones begin at once


class ExchangeContestant:
    """The peer at one seat."""

    def __init__(self, seat: ExchangeSeat) -> None:
        self.seat, manifest = seat, parse_manifest(seat.manifest)
        self.identity = Identity.load_or_create(Path(seat.folder) / f"{seat.number}.key")
        made = make_transport(seat.transport, self.identity, tuple(seat.listen))
        self.transport = throttle(made, Caps(up=seat.up, down=seat.down), None)
        self._model = LiveModel(model_of(seat.rows, many=seat.many), 1, None)
        self.node = self._node(manifest)
        self._schedule, self._held, self._digest = make_schedule(manifest, b""), 0.0, ""
        self._sent_before = 0  # bytes, when the last stand-in for training began
        self._schedule.timing.overlap = int(seat.overlap)
        self._awaited = -1  # the outer step that has what was offered last; -1: nothing was
        self._met = 0  # of a pair: 2, of one alone: 1
        self._news, self._updates = Changes(), list[CommittedUpdate]()
        generator = torch.Generator().manual_seed(seat.number)
        self._gradient_N = torch.randn(seat.rows * 1024, generator=generator)
        self._nbytes = self._body_nbytes()

    def _node(self, manifest: Manifest) -> Node:
        start = Start(
            manifest=manifest,
            schema=self._model.schema,
            anchors=self._model.read_all(),
            founder=not self.seat.bootstrap,
            bootstrap=tuple(self.seat.bootstrap),
        )
        return Node(
            start,
            signer=self.identity.signer,
            transport=self.transport,
            ledger=Ledger(lambda commit, frames: None, lambda blob: None),
            on_update=self._on_update,
            on_event=lambda event, fields: None,
            uplink=lambda: self.transport.uplink,
        )

    def _body_nbytes(self) -> int:
        """Return the bytes that are sent in a round, all channels of the method together."""
        replica = self.node.replica
        others = [self._gradient_N] * (len(replica.due(0)) - 1)
        return len(replica.codec.encode(self._gradient_N, {}, replica.shapes(0), others).body)

    def _on_update(self, update: CommittedUpdate) -> None:
        self._updates.append(update)
        self._news.tell()

    async def run(self) -> None:
        """Obey until stdin ends."""
        async with self.transport, anyio.create_task_group() as self._group:
            await self._group.start(self.node.run)
            _say(addresses=self.transport.addresses())
            while line := await anyio.to_thread.run_sync(sys.stdin.readline):
                _say(**await self._obey(str(json.loads(line)["do"])))
            self._group.cancel_scope.cancel()

    async def _obey(self, order: str) -> dict[str, Any]:  # Any: JSON
        if order == "members":
            head = self.node.driver.head
            return {"members": len(head.members) if head.anchor is not None else 0}  # None: still applied
        if order == "train":
            self._sent_before = self.transport.traffic.total.sent
            self._train()
            return {}
        return await self._round()

    async def _round(self) -> dict[str, Any]:  # Any: JSON
        """A round, from the end of its inner steps; with overlap, of the contribution before, in flight meanwhile."""
        began, worked, self._held = time.monotonic(), processor_seconds(), 0.0
        await anyio.sleep(self.seat.computing)  # in place of inner steps, without the processor
        await (self._as_all() if self.node.gossip is None else self._as_pair(self.node.gossip))
        return {
            "seconds": time.monotonic() - began,
            "held": self._held,
            "processor": processor_seconds() - worked,
            "nbytes": self._nbytes,
            "sent": self.transport.traffic.total.sent - self._sent_before,
            "digest": self._digest,
            **(self._decided() if self.node.gossip is None else {"contributors": self._met, "ballot": 0}),
        }

    async def _as_all(self) -> None:
        """Take the step of a method by which all peers step together."""
        if self.seat.overlap:
            await self._until_merged()
        offered = self._take(self.node.driver.head)
        self._awaited = self.node.driver.head.outer_step
        if self.seat.overlap:
            self._group.start_soon(self.node.driver.contribute, offered)
        else:
            await self.node.driver.contribute(offered)
            await self._until_merged()

    async def _as_pair(self, gossip: Gossip) -> None:
        """Take the step of a method by which two step. Replicas are never equal: what all peers have alike is that they
        met somebody.
        """
        made = self._take(self.node.driver.head, gossip.step)
        swapped = await gossip.exchange(made)
        self._met, self._digest = (1, "alone") if swapped.partner is None else (2, "met")
        began = time.monotonic()
        self._schedule.merge_swap(self._model, 0, swapped.after_N)
        self._held += time.monotonic() - began

    async def _until_merged(self) -> None:
        """Wait for the round of what was offered last, and bring it into the model."""
        while (head := self.node.driver.head).outer_step == self._awaited or head.anchor is None:  # still applied
            await self._news.next()
        self._digest = self.node.replica.digest.hex()
        self._merge()

    def _train(self) -> None:
        """Make as much progress as in every round, back and forth: were it always the same, values would grow for as
        long as the benchmark lasts, and progress beside large values has few bits that differ, which pack better.
        """
        self._gradient_N = -self._gradient_N
        self._model.write(0, difference(self.node.replica.anchors[0], self._gradient_N))
        self._schedule.stepped()

    def _take(self, head: Head, step: int | None = None) -> Contribution:
        """As a training thread does it: parameters are copied out. ``step``: of a pair; None: the head's."""
        began, replica = time.monotonic(), self.node.replica
        step = head.outer_step if step is None else step
        made = self._schedule.take(self._model, 0, replica.anchors[0], head.hash, 1, outer_step=step)
        if made is None:  # too many rounds went by without what it has: it begins anew
            self._schedule.restart(self._model, replica.anchors, (0,))
            self._train()
            return self._take(head, step)
        made.check_finite(replica)
        self._held += time.monotonic() - began
        return made

    def _merge(self) -> None:
        """As a training thread does it: what came goes into the model."""
        began = time.monotonic()
        while self._updates:
            self._schedule.merge(self._updates.pop(0), self._model)
        self._held += time.monotonic() - began

    def _decided(self) -> dict[str, int]:
        """How many the newest commit names, and the ballot that decided it; nobody when it was learnt by a snapshot."""
        commit = self.node.driver.machine.state.recent.get(self.node.driver.head.round)
        if commit is None:
            return {"contributors": 0, "ballot": 0}
        return {
            "contributors": len(commit.record.contributors or commit.record.frames),
            "ballot": commit.certificate.ballot,
        }


_WIDTH, _INNER = 512, 1408  # of a language model's blocks
_BLOCK = ((_WIDTH, _WIDTH),) * 4 + ((_INNER, _WIDTH),) * 2 + ((_WIDTH, _INNER), (_WIDTH,), (_WIDTH,))
_EACH = 3_300_000  # values for one block, with its share of the embedding


def model_of(rows: int, *, many: bool) -> torch.nn.Module:
    """Return a model of so many rows of 1,024 values: one tensor, or ``many``, those of a language model, as with 30
    MiB of values 83: nine blocks of attention, gated MLP and two norms, an embedding, the last norm.
    """
    shapes: list[tuple[int, ...]] = [(rows, 1024)]
    if many:
        blocks = _BLOCK * (rows * 1024 // _EACH)
        left = rows * 1024 - sum(map(math.prod, blocks)) - _WIDTH
        shapes = [(left // _WIDTH, _WIDTH), *blocks, (_WIDTH,)]
    module = torch.nn.Module()
    for number, shape in enumerate(shapes):
        module.register_parameter(f"p{number:03}", torch.nn.Parameter(torch.zeros(shape, dtype=torch.float32)))
    return module


def processor_seconds() -> float:
    """Return the processor time of this process and its daemon so far."""
    me = psutil.Process()
    return sum(sum(one.cpu_times()[:2]) for one in (me, *me.children(recursive=True)))


def _say(**answer: Any) -> None:  # Any: JSON
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    anyio.run(ExchangeContestant(ExchangeSeat(**json.loads(sys.argv[1]))).run)
