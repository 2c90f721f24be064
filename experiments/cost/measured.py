"""What a peer sends per round in simulated swarms of the real code, from 2 peers to many, by kind of message.

    python -m experiments.cost.measured --sizes 2,4,8,16,32,64 > cost.jsonl
    python -m experiments.cost.measured --table cost.jsonl

Nothing fails (profile ``even``); terms as the presets have them, a model of 25 million values that small tensors stand
for. Counted from one outer step to another, at rest after all have joined, on average over the peers.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import anyio

from decentral.manifest import preset_manifest
from decentral.simulate.lessons import stand_in_for
from decentral.simulate.scenario import Scenario, on_lines, profile_named
from decentral.simulate.simulation import simulate
from decentral.simulate.troubles import Afflicted
from decentral.transport.memory import MemoryNetwork, MemoryTransport

NUMEL = 25_000_000
PRESETS = {"gather": "sparseloco", "reduce": "diloco", "pair": "noloco"}
STEP_SECONDS = 1.0
PARTS = {
    "frame": "frames",
    "fetch": "frames",
    "piece": "frames",
    "pair": "frames",
    "control": "votes",
    "lease": "directory",
    "leases": "directory",
    "lease-list": "directory",
}


class Meter:
    """Looks at all peers' counts after the second outer step, and again ``rounds`` later. It befalls nobody."""

    def __init__(self, world: Afflicted, rounds: int) -> None:
        self.world, self.rounds = world, rounds
        self.found: dict[str, Any] = {}

    async def run(self) -> None:
        """See Trouble."""
        await self._until(2)
        began, before, sent = anyio.current_time(), self._sent(), dict(MESSAGES)
        await self._until(2 + self.rounds)
        after, seconds = self._sent(), anyio.current_time() - began
        num = self.rounds * len(self.world.hosts)
        self.found = {
            "seconds": round(seconds / self.rounds, 2),
            "bytes": {part: round((after[part] - before[part]) / num) for part in sorted(after)},
            "messages": {part: round((MESSAGES[part] - sent.get(part, 0)) / num, 1) for part in sorted(MESSAGES)},
        }
        await anyio.sleep_forever()

    async def _until(self, step: int) -> None:
        """Just after the step: then no round is under way."""
        while self._least() < step:
            await anyio.sleep(0.25)
        await anyio.sleep(1.0)

    def _least(self) -> int:
        nodes = [host.process.node for host in self.world.hosts if host.process is not None]
        return min(node.outer_steps for node in nodes)

    def _sent(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for host in self.world.hosts:
            assert host.process is not None
            for protocol, count in host.process.transport.traffic.kinds.items():
                counts[_part(protocol)] += count.sent
        return counts


def _part(protocol: str) -> str:
    return PARTS.get(protocol.split("/")[2], "joining")


MESSAGES: Counter[str] = Counter()  # bodies sent, by part, in all


def count_messages() -> None:
    """Have every body that leaves a peer counted, whole or on a stream; answers are not."""
    posted, accept = MemoryNetwork.posted, MemoryTransport.accept

    def count_posted(self: MemoryNetwork, letter: Any) -> None:
        MESSAGES[_part(letter.protocol)] += 1
        posted(self, letter)

    def count_accepted(self: MemoryTransport, stream: Any, protocol: str) -> None:
        MESSAGES[_part(protocol)] += 1
        accept(self, stream, protocol)

    MemoryNetwork.posted = count_posted  # type: ignore[method-assign]
    MemoryTransport.accept = count_accepted  # type: ignore[method-assign]


def measure(kind: str, peers: int, rounds: int) -> dict[str, Any]:
    """One swarm."""
    manifest = preset_manifest(PRESETS[kind], run={"rounds": 1_000_000, "salt": "cost", "seed": 0})
    training, ceiling = STEP_SECONDS * manifest.inner.steps, manifest.swarm.deadline_ceiling
    scenario = Scenario(
        manifest,
        on_lines(profile_named("even"), 20e6 / 8),
        hosts=peers,
        rounds=rounds + 3,
        step_seconds=STEP_SECONDS,
        calm_start=True,
        lesson="tiles",
        patience=4.0 * (training + ceiling),
        settle=20.0 * training + 40.0 * ceiling,
        stand_in=stand_in_for(manifest, NUMEL, peers, "tiles"),
    )
    meters: list[Meter] = []
    MESSAGES.clear()
    began = time.process_time()

    def afflict(world: Afflicted) -> Meter:
        meters.append(Meter(world, rounds))
        return meters[0]

    outcome = simulate(scenario, afflict)
    took = round(time.process_time() - began, 1)
    return {
        "kind": kind,
        "peers": peers,
        **meters[0].found,
        "processor": took,
        "problems": outcome.to_dict()["problems"],
    }


def table(lines: list[str]) -> str:
    """Markdown: bytes per peer and round, by part."""
    rows = ["| | peers | seconds a round | frames | votes | directory | all, MB | messages |", "|---" * 8 + "|"]
    for found in map(json.loads, lines):
        sent = found["bytes"]
        parts = [f"{sent.get(part, 0) / 1e6:.3f}" for part in ("frames", "votes", "directory")]
        whole = sum(sent.get(part, 0) for part in ("frames", "votes", "directory")) / 1e6
        messages = sum(found["messages"].get(part, 0) for part in ("frames", "votes", "directory"))
        cells = [found["kind"], found["peers"], found["seconds"], *parts, f"{whole:.2f}", f"{messages:.0f}"]
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(rows)


def main() -> int:
    """1 when a guarantee was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="2,4,8,16,32")
    parser.add_argument("--kinds", default="gather,reduce,pair")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--table", type=Path, help="print what an earlier run found")
    options = parser.parse_args()
    if options.table is not None:
        print(table(options.table.read_text(encoding="utf-8").splitlines()))
        return 0
    count_messages()
    failed = False
    for size in map(int, options.sizes.split(",")):
        for kind in options.kinds.split(","):
            found = measure(kind, size, options.rounds)
            failed = failed or bool(found["problems"])
            print(json.dumps(found), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
