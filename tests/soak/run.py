"""Does anything grow in a swarm that runs for long? Memory, descriptors, threads and folders of real peers, sampled.

    python -m tests.soak.run --rounds 1000 --mbit 50 --cut-every 60 --kill-every 90 --out soak-run

Every peer sits behind a line of so many Mbit/s. The second one's line is cut for some seconds again and again, so that
rounds fail while bytes are on their way; the last one is killed and comes back. The others live from the first round to
the last. Linux, root.
"""

from __future__ import annotations

import argparse
import json
import math
import threading
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.chaos.trend import Trend, trend
from tests.kit.processes import daemon_of, usage
from tests.soak.swarm import SoakSwarm, Terms, clear, largest_files, size_of

SAMPLE_EVERY = 2.0  # s
CUT_FOR = 6.0  # s


@dataclass(slots=True)
class Found:
    """Series of (s, value): by what, and by which process or folder."""

    memory: dict[object, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    daemon: dict[object, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    fds: dict[object, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    threads: dict[object, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    folder: dict[object, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    rounds: list[tuple[float, float]] = field(default_factory=list)
    cuts: int = 0
    kills: int = 0


class Soak:
    """Watches a swarm, and makes its rounds fail."""

    def __init__(self, swarm: SoakSwarm, *, cut_every: float, kill_every: float) -> None:
        self.swarm, self.found = swarm, Found()
        self._cut_every, self._kill_every = cut_every, kill_every
        self._began = time.monotonic()
        self._cut_at, self._killed_at = self._began, self._began

    def run(self, seconds: float, settled: int = 0) -> Found:
        """Until the run is over, or so many seconds have passed since round ``settled``, with which trouble begins."""
        nobody, since = threading.Event(), math.inf
        while time.monotonic() - since < seconds:
            self._sample()
            if since == math.inf and self.found.rounds[-1][1] >= settled:
                since = self._cut_at = self._killed_at = time.monotonic()
            if since < math.inf:
                self._trouble()
            first = self.swarm.peers[0]
            assert first.process is not None
            if first.process.poll() is not None:
                break
            nobody.wait(SAMPLE_EVERY)
        self.swarm.peers[1].host.wire.mend()
        return self.found

    def _sample(self) -> None:
        now = time.monotonic() - self._began
        for number, peer in enumerate(self.swarm.peers):
            assert peer.process is not None
            key = (number, peer.process.pid)
            for series, held in (
                (self.found.memory, usage(peer.process.pid)),
                (self.found.daemon, self._daemon(key[1])),
            ):
                if held is not None:
                    series[key].append((now, held.anonymous))
                    if series is self.found.memory:
                        self.found.fds[key].append((now, held.fds))
                        self.found.threads[key].append((now, held.threads))
            self.found.folder[number].append((now, size_of(peer.folder)))
        self.found.rounds.append((now, self.swarm.peers[0].status().round))

    def _daemon(self, pid: int):  # type: ignore[no-untyped-def]
        child = daemon_of(pid)
        return None if child is None else usage(child)

    def _trouble(self) -> None:
        now, wire = time.monotonic(), self.swarm.peers[1].host.wire
        if self._cut_every and now - self._cut_at > self._cut_every:
            wire.cut()
            self._cut_at = now
            self.found.cuts += 1
        elif now - self._cut_at > CUT_FOR:
            wire.mend()
        if self._kill_every and now - self._killed_at > self._kill_every:
            self.swarm.peers[-1].kill()
            self.swarm.peers[-1].start()
            self._killed_at = now
            self.found.kills += 1


def rows(found: Found, skip: float) -> dict[str, dict[str, float]]:
    """Of each thing: the first and last value of the peer that lived longest, the most, and the slope per hour."""
    table = {}
    for name in ("memory", "daemon", "fds", "threads", "folder"):
        series = getattr(found, name)
        if not series:
            continue
        longest = max(series.values(), key=len)
        settled = [value for at, value in longest if at >= skip] or [value for _, value in longest]
        slope: Trend | None = trend(series, skip=skip, least=60.0)
        table[name] = {
            "after_settling": settled[0],
            "last": settled[-1],
            "most": max(value for rows in series.values() for _, value in rows),
            **({} if slope is None else {"per_hour": slope.per_hour, "error": slope.error}),
        }
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=600.0, help="at most")
    parser.add_argument("--mbit", type=float, default=50.0)
    parser.add_argument("--preset", default="diloco")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--inner-steps", type=int, default=5)
    parser.add_argument("--transport", default="daemon")
    parser.add_argument("--cut-every", type=float, default=60.0, help="seconds; 0: never")
    parser.add_argument("--kill-every", type=float, default=90.0, help="seconds; 0: never")
    parser.add_argument("--settle", type=float, default=600.0, help="seconds that are left out of slopes")
    parser.add_argument("--out", type=Path, default=Path("soak-run"))
    given = parser.parse_args()
    folder = clear(given.out.absolute())
    terms = Terms(
        rounds=given.rounds,
        mbit=given.mbit,
        preset=given.preset,
        hidden=given.hidden,
        inner_steps=given.inner_steps,
        transport=given.transport,
    )
    with SoakSwarm(folder, terms) as swarm:
        found = Soak(swarm, cut_every=given.cut_every, kill_every=given.kill_every).run(60 * given.minutes)
        files = largest_files(swarm.peers[0].folder)
        traffic = swarm.peers[0].status()
    said = {
        "terms": asdict(terms),
        "seconds": found.rounds[-1][0],
        "round": found.rounds[-1][1],
        "cuts": found.cuts,
        "kills": found.kills,
        "bytes_sent": traffic.bytes_sent,
        "table": rows(found, given.settle),
        "files": files,
        "series": {
            name: {str(key): each[::15] for key, each in getattr(found, name).items()}
            for name in ("memory", "fds", "folder")
        },
    }
    (folder / "soak.json").write_text(json.dumps(said))
    print(json.dumps({key: value for key, value in said.items() if key != "series"}, indent=1))


if __name__ == "__main__":
    main()
