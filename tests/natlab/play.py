"""Real peers with their daemons in a scenario's places, training until their rounds are done or time is up."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from decentral.manifest import Manifest, preset_manifest
from decentral.swarm.identity import Identity
from tests.chaos.nursery import Nursery
from tests.kit.processes import send
from tests.natlab.lab import Lab
from tests.natlab.meter import Meter, best_second, mean_share, paths
from tests.natlab.outcome import Outcome, reached, shared_records
from tests.natlab.scenarios import Scenario, Trouble
from tests.natlab.stage import Stage

LOOK_EVERY = 0.1  # s
FOUNDING = 60.0  # s for the founder's invite
LEAVING = 20.0  # s
PAUSE = 0.05  # s between two inner steps


def terms(num_peers: int, rounds: int) -> Manifest:
    """A model of 0.8 MB sent whole: a round of three peers keeps a line of 10 Mbit/s busy for 1.3 s."""
    return preset_manifest(
        "sparseloco",
        run={"rounds": rounds, "salt": "natlab"},
        model={"hidden": 128, "layers": 1, "heads": 2, "context": 16},
        data={"batch_size": 2},
        inner={"steps": 4, "warmup": 0},
        compressor={"chain": "none", "feedback": "none"},
        swarm={"min_peers": num_peers, "deadline_floor": 2.0, "deadline_ceiling": 20.0, "lease": 6.0},
    )


class Play:
    """One scenario while it is played."""

    def __init__(self, lab: Lab, scenario: Scenario, nursery: Nursery, folder: Path, rounds: int) -> None:
        self.stage, self.nursery, self.folder = Stage(lab, scenario, folder), nursery, folder
        self.outcome = Outcome(scenario.name, scenario.missing, rounds, scenario.least_with_all)
        self._manifest = terms(len(scenario.seats), rounds)
        self._meter = Meter(lab, self.stage)
        self._running: dict[int, str] = {}
        self._rows: dict[str, list[dict[str, Any]]] = {seat.name: [] for seat in scenario.seats}
        self._read: Counter[str] = Counter()
        self._trouble, self._relief = scenario.trouble, float("inf")

    def run(self, limit: float) -> Outcome:
        """Start all, let things happen, ask who still runs to leave, and judge."""
        if self.stage.relay is not None:
            self.stage.relay.start()
        founder, *others = self.stage.hosts
        self._start(founder, None)
        try:
            if not self._go_on(lambda: bool(self._invite(founder)), FOUNDING):
                self.outcome.ends[founder] = "no invite"
                return self.outcome
            for name in others:
                self._start(name, self._invite(founder))
            began = time.monotonic()
            self._go_on(lambda: not self._running, limit)
            self.outcome.seconds = round(time.monotonic() - began, 1)
        finally:
            self._end()
            if self.stage.relay is not None:
                self.stage.relay.kill()
        self._judge(began)
        return self.outcome

    # ---- peers ----

    def _start(self, name: str, invite: str | None) -> None:
        out = self.folder / name
        out.mkdir(parents=True)
        (out / "run.toml").write_text(self._manifest.to_toml())
        order: dict[str, Any] = {
            "name": name,
            "out": str(out),
            "listen": None,
            "invite": invite,
            "seed": len(self._running),
            "relays": [self.stage.relay.address] if self.stage.relay is not None else [],
        }
        order |= {"pause": PAUSE, "checkpoint_every": 100, "network": self.stage.hosts[name].path}
        self._running[self.nursery.start(order)] = name

    def _invite(self, name: str) -> str:
        return next((row["invite"] for row in self._rows[name] if row["event"] == "joined"), "")

    def _end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in self._running:
                send(pid, number)
            if self._go_on(lambda: not self._running, LEAVING):
                return

    def _ended(self, pid: int, code: int) -> None:
        name = self._running.pop(pid, None)
        if name is not None and code != 0:
            self.outcome.ends[name] = f"exit {code}: {_last_words(self.folder / name / 'log.txt')}"

    # ---- time ----

    def _go_on(self, until: Callable[[], bool], limit: float) -> bool:
        end = time.monotonic() + limit
        while not until():
            if time.monotonic() > end:
                return False
            ended = self.nursery.ended(LOOK_EVERY)
            if ended is not None and ended["event"] == "ended":
                self._ended(int(ended["pid"]), int(ended["code"]))
            self._meter.look()
            for name in self._rows:
                self._read_events(name)
            self._let_trouble_come()
        return True

    def _let_trouble_come(self) -> None:
        trouble: Trouble | None = self._trouble
        if trouble is None:
            return
        now = time.monotonic()
        if self._relief < now:
            self.stage.relieve(trouble)
            self._trouble = None
        elif self._relief == float("inf") and len(shared_records(self._rows.values())) >= trouble.after_rounds:
            self.stage.befall(trouble)
            self._relief = now + trouble.seconds

    # ---- what came of it ----

    def _read_events(self, name: str) -> None:
        path = self.folder / name / "events.jsonl"
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._read[name])
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read[name] += len(whole)
        self._rows[name] += map(json.loads, whole.splitlines())

    def _judge(self, began: float) -> None:
        names = {name: Identity.load_or_create(self.folder / name / "identity.key").name for name in self._rows}
        records = shared_records(self._rows.values())
        self.outcome.judge(records, names, began)
        for name, rows in self._rows.items():
            if not any(row["event"] == "joined" for row in rows):
                self.outcome.ends[name] = "never joined"
        stands = {name: reached(rows) for name, rows in self._rows.items()}
        for name, at in stands.items():
            if at < max(stands.values()):
                self.outcome.ends.setdefault(name, f"left behind at round {at} of {max(stands.values())}")
        self._judge_lines([row["mono"] for rows in records for row in rows])

        def met(a: str, b: str) -> bool:
            return any({names[a], names[b]} <= set(rows[0]["contributors"]) for rows in records)

        self.outcome.paths = paths(self.stage, self.stage.lab.flows(), met)

    def _judge_lines(self, commits: Sequence[float]) -> None:
        samples, uplinks = self._meter.samples, self._meter.uplinks()
        mbit, share = best_second(samples, uplinks)
        for number, nbytes in samples[-1][1].items():
            seats = [name for name, host in self.stage.hosts.items() if host.number == number]
            self.outcome.sent["+".join(seats)] = round(nbytes / 1e6, 2)
        self.outcome.mbit, self.outcome.share = round(mbit, 2), round(share, 3)
        if commits:
            self.outcome.mean_share = round(mean_share(samples, uplinks, min(commits), max(commits)), 3)


def _last_words(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
    return next((line for line in reversed(lines) if line.startswith("error:")), (lines or ["no word"])[-1])[:300]
