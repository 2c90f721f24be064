"""How fast the lines were used, and which way the bytes went: read from the core's counters, claimed by nobody."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path

from tests.natlab.flows import Flow, between
from tests.natlab.lab import Lab
from tests.natlab.stage import Stage

FRAMES = 1 << 19  # bytes between two households that are more than chatter: more than half a frame of the lab's model

_CLOSE = 1e-6  # s: samples that far apart count as taken at once

Sample = tuple[float, Mapping[int, int]]  # s of the monotonic clock, bytes that each household has sent so far


class Meter:
    """Samples what every household has sent; ``look`` often."""

    def __init__(self, lab: Lab, stage: Stage) -> None:
        self._lab, self._wires = lab, stage.wires()
        self.samples: list[Sample] = []

    def look(self) -> None:
        """Take one sample, from the core's ends of the lines."""
        lines = self._lab.core.do(lambda: Path("/proc/thread-self/net/dev").read_text()).splitlines()[2:]
        received = {line.split(":")[0].strip(): int(line.split(":")[1].split()[0]) for line in lines}
        self.samples.append((time.monotonic(), {number: received[wire.far] for number, wire in self._wires.items()}))

    def uplinks(self) -> dict[int, float]:
        """Mbit/s that each household may send."""
        return {number: wire.line.up for number, wire in self._wires.items() if wire.line.up}


def best_second(samples: Sequence[Sample], uplinks: Mapping[int, float]) -> tuple[float, float]:
    """Mbit/s and share of the uplink that was used most in any one second."""
    times = [at for at, _ in samples]
    best = (0.0, 0.0)
    for at, sent in samples:
        start = bisect_right(times, at - 1.0 + _CLOSE) - 1  # the last sample a second ago
        if start >= 0:
            best = max(best, _busiest(samples[start], (at, sent), uplinks), key=lambda found: found[1])
    return best


def mean_share(samples: Sequence[Sample], uplinks: Mapping[int, float], since: float, until: float) -> float:
    """Share of the busiest uplink over all that time, inner steps and waiting included."""
    inside = [sample for sample in samples if since <= sample[0] <= until]
    return _busiest(inside[0], inside[-1], uplinks)[1] if len(inside) > 1 else 0.0


def _busiest(first: Sample, last: Sample, uplinks: Mapping[int, float]) -> tuple[float, float]:
    seconds = last[0] - first[0]
    rates = {number: 8e-6 * (last[1][number] - first[1][number]) / seconds for number in uplinks}
    return max(((rate, rate / uplinks[number]) for number, rate in rates.items()), key=lambda found: found[1])


def paths(stage: Stage, flows: Counter[Flow], met: Callable[[str, str], bool]) -> dict[str, str]:
    """For each two seats how their bytes went: direct, punched, through <seat>, at home; none when they never met.

    ``met``: whether both committed a record that names a frame of each.
    """
    return {f"{a}-{b}": _path(stage, flows, a, b) if met(a, b) else "none" for a, b in combinations(stage.hosts, 2)}


def _path(stage: Stage, flows: Counter[Flow], a: str, b: str) -> str:
    one, other = stage.hosts[a].number, stage.hosts[b].number
    if between(flows, [one], [other]) > FRAMES:
        if one == other:
            return "at home"
        return "direct" if stage.public(a) or stage.public(b) else "punched"
    for name, host in stage.hosts.items():
        third = host.number
        if third not in (one, other) and min(between(flows, [one], [third]), between(flows, [third], [other])) > FRAMES:
            return f"through {name}"
    relayed = stage.relay is not None and min(_over(flows, stage.relay.number, n) for n in (one, other)) > FRAMES
    return "relayed" if relayed else "some other way"


def _over(flows: Counter[Flow], relay: int, home: int) -> int:
    return between(flows, [home], [relay])
