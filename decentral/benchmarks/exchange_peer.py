"""One peer of the exchange benchmark, a process of its own: contributes when told to, tells when the commit is applied.

python -m decentral.benchmarks.exchange_peer '{"folder": ..., "number": 0, ...}'

Hears and says one JSON object a line, on stdin and stdout. The peer is the real one: daemon, directory, rounds,
signatures, digests. Only its training is left out, and its disk.
"""

from __future__ import annotations

import json
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

from decentral.errors import DecentralError
from decentral.flow.changes import Changes
from decentral.manifest import Manifest, parse_manifest
from decentral.node.links import throttled
from decentral.node.node import Node, Start
from decentral.parameters import schema_of
from decentral.replica.contribution import Contribution
from decentral.rounds.updates import CommittedUpdate, Ledger
from decentral.swarm.identity import Identity
from decentral.tensors.elementwise import difference
from decentral.transport.choice import make_transport
from decentral.transport.throttle import Caps


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSeat:
    """What a peer of the benchmark is told on its command line."""

    folder: str
    number: int
    manifest: str
    rows: int  # of 1,024 values
    listen: Sequence[str] = ("/ip4/127.0.0.1/tcp/0",)
    bootstrap: Sequence[str] = ()
    up: float | None = None  # caps, bytes/s
    down: float | None = None
    transport: str | None = None


class ExchangeContestant:
    """The peer at one seat."""

    def __init__(self, seat: ExchangeSeat) -> None:
        self.seat, manifest = seat, parse_manifest(seat.manifest)
        self.identity = Identity.load_or_create(Path(seat.folder) / f"{seat.number}.key")
        made = make_transport(seat.transport, self.identity, tuple(seat.listen))
        self.transport = throttled(made, Caps(up=seat.up, down=seat.down), None)
        self.node = self._node(manifest)
        self._news = Changes()
        generator = torch.Generator().manual_seed(seat.number)
        self._gradient_N = torch.randn(seat.rows * 1024, generator=generator)
        replica = self.node.replica
        self._nbytes = len(replica.codec.encode(self._gradient_N, {}, replica.shapes(0)).body)

    def _node(self, manifest: Manifest) -> Node:
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(torch.zeros(self.seat.rows, 1024))
        schema = schema_of(model, 1)
        start = Start(
            manifest=manifest,
            schema=schema,
            anchors=[torch.zeros(schema.fragments[0].numel)],
            founder=not self.seat.bootstrap,
            bootstrap=tuple(self.seat.bootstrap),
        )
        return Node(
            start,
            signer=self.identity.signer,
            transport=self.transport,
            ledger=Ledger(lambda commit, frames: None, lambda blob: None),
            on_update=self._updated,
            on_event=lambda event, fields: None,
            uplink=lambda: self.transport.uplink,
        )

    def _updated(self, update: CommittedUpdate) -> None:
        self._news.tell()

    async def run(self) -> None:
        """Obey until stdin ends."""
        async with self.transport, anyio.create_task_group() as group:
            await group.start(self.node.run)
            _say(addresses=self.transport.addresses())
            while line := await anyio.to_thread.run_sync(sys.stdin.readline):
                _say(**await self._obey(str(json.loads(line)["do"])))
            group.cancel_scope.cancel()

    async def _obey(self, order: str) -> dict[str, Any]:  # Any: JSON
        if order == "members":
            head = self.node.driver.head
            return {"members": len(head.members) if head.anchor is not None else 0}  # None: still applied
        return await self._round()

    async def _round(self) -> dict[str, Any]:  # Any: JSON
        driver, traffic = self.node.driver, self.transport.traffic.total
        head, sent = driver.head, traffic.sent
        local_N = difference(self.node.replica.anchors[0], self._gradient_N)  # a trainer has it before the round begins
        began, worked = time.monotonic(), _processor_seconds()
        if not await driver.contribute(Contribution(0, head.hash, local_N, self._gradient_N, 1, 1)):
            raise DecentralError(f"round {head.round + 1} takes no contribution now; run it again")
        while driver.head.outer_step == head.outer_step:
            await self._news.next()
        return {
            "seconds": time.monotonic() - began,
            "processor": _processor_seconds() - worked,
            "nbytes": self._nbytes,
            "sent": traffic.sent - sent,
            "digest": self.node.replica.digest.hex(),
            "contributors": self._named(),
        }

    def _named(self) -> int:
        """Contributors of the newest commit; 0 when it was learnt by a snapshot."""
        commit = self.node.driver.machine.state.recent.get(self.node.driver.head.round)
        return 0 if commit is None else len(commit.record.contributors or commit.record.frames)


def _processor_seconds() -> float:
    """Of this process and its daemon, so far."""
    me = psutil.Process()
    return sum(sum(one.cpu_times()[:2]) for one in (me, *me.children(recursive=True)))


def _say(**answer: Any) -> None:  # Any: JSON
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    anyio.run(ExchangeContestant(ExchangeSeat(**json.loads(sys.argv[1]))).run)
