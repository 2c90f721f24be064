"""The rounds of `lab.py`, simulated: the same peers, lines, delay, body and compressor.

    python -m experiments.exchange.forecast --kind gather --peers 4 --mbit 0.5 --delay 0.02 --megabytes 100 --compressor "topk(k=64, chunk=4096) >> signmag2"

Prints seconds from the end of an inner step to the next one, without that step, and what a peer sent per round. A real
line carries headers, too, and what the other direction acknowledges; a simulated one takes what is left of its rate.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from itertools import pairwise

from decentral.benchmarks.exchange import PRESETS
from decentral.manifest import preset_manifest
from decentral.simulate.lessons import stand_in_for
from decentral.simulate.scenario import Scenario, on_lines, profile_named
from decentral.simulate.simulation import simulate
from decentral.simulate.troubles import Afflicted
from experiments.cost.measured import Meter

# Of 1,514 bytes of a full Ethernet frame 1,448 are a stream's; each second one is acknowledged by 66 the other way,
# where as much is going on: 1448 / (1514 + 66 / 2).
PAYLOAD = 0.936
TRAINS = 10.0  # s of the one inner step between two rounds


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=sorted(PRESETS), default="gather")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--mbit", type=float, default=20.0, help="each way, headers included")
    parser.add_argument("--delay", type=float, default=0.0125, help="seconds from a peer to the core, one way")
    parser.add_argument("--megabytes", type=int, default=1, help="of float32")
    parser.add_argument("--compressor", default="none")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    manifest = preset_manifest(
        PRESETS[given.kind],
        run={"rounds": 1_000_000, "salt": "lab", "seed": 0},
        inner={"steps": 1},
        compressor={"chain": given.compressor},
        swarm={"deadline_ceiling": 600.0},
    )
    lines = replace(on_lines(profile_named("even"), 1.25e5 * given.mbit * PAYLOAD), latency=2 * given.delay)
    scenario = Scenario(
        manifest,
        lines,
        hosts=given.peers,
        rounds=given.rounds + 3,
        step_seconds=TRAINS,
        calm_start=True,
        lesson="tiles",
        patience=1e4,
        settle=1e5,
        stand_in=stand_in_for(manifest, given.megabytes * 262_144, given.peers, "tiles"),
    )
    meters: list[Meter] = []

    def afflict(world: Afflicted) -> Meter:
        meters.append(Meter(world, given.rounds))
        return meters[0]

    outcome = simulate(scenario, afflict)
    ends = [
        entry.time for entry in outcome.trace.of("swapped" if given.kind == "pair" else "applied") if not entry.host
    ]
    took = [after - before - TRAINS for before, after in pairwise(ends)][-given.rounds - 3 : -3]
    print(
        json.dumps(
            {
                "seconds": [round(one, 2) for one in took],
                "median": round(statistics.median(took), 2),
                "bytes": meters[0].found.get("bytes"),
                "problems": outcome.to_dict()["problems"],
            }
        )
    )


if __name__ == "__main__":
    main()
