"""The swarm under torment: real peers on loopback, a clock of planned actions, a log of what was done to whom."""

from __future__ import annotations

import heapq
import itertools
import json
import random
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from decentral.manifest import Manifest
from decentral.swarm.identity import Identity
from decentral.swarm.invite import Invite
from tests.chaos.nursery import Nursery
from tests.chaos.subject import Subject
from tests.kit.processes import daemon_of, send, usage

SAMPLE_EVERY = 5.0  # s between two looks at memory and descriptors
LEAVING = 20.0  # s: a peer promises 10, on a machine of its own


def free_ports(number: int) -> list[int]:
    """Ports of loopback that are free now, outside the range from which the kernel lends others."""
    found: list[int] = []
    candidates = list(range(20000, 32000))
    random.SystemRandom().shuffle(candidates)
    for port in candidates:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == number:
            return found
    raise RuntimeError("no free ports on loopback")


class Arena:
    """Starts and restarts peers, applies actions when their time has come, and writes ``faults.jsonl``."""

    def __init__(self, folder: Path, nursery: Nursery, manifest: Manifest, pause: float) -> None:
        self.folder, self.nursery, self.manifest, self.pause = folder, nursery, manifest, pause
        self.subjects: list[Subject] = []
        self.invite = ""
        self.samples: list[dict[str, Any]] = []
        self.log: list[dict[str, Any]] = []
        self.surprises: list[str] = []
        self.ending = False
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._file = (folder / "faults.jsonl").open("w")
        self._samples = (folder / "samples.jsonl").open("w")

    # ---- peers ----

    def settle_in(self, num_peers: int, small_disks: tuple[int, ...]) -> None:
        """Give every peer a key, a port and the terms."""
        for number, port in enumerate(free_ports(num_peers)):
            folder = self.folder / f"peer{number}"
            folder.mkdir(exist_ok=True)
            (folder / "run.toml").write_text(self.manifest.to_toml())
            identity = Identity.load_or_create(folder / "identity.key")
            subject = Subject(number, folder, identity, port, number == 0, number in small_disks)
            self.subjects.append(subject)
        addresses = tuple(subject.address for subject in self.subjects)
        self.invite = str(Invite(self.manifest.digest, addresses[:8], None))

    def start(self, subject: Subject) -> None:
        """Start a peer in its folder, as a person would: the founder by its terms, the others by the invite."""
        if subject.pid is not None or self.ending:
            return
        order = {
            "name": subject.name,
            "out": str(subject.folder),
            "listen": subject.listen,
            "invite": None if subject.founder else self.invite,
            "seed": 1000 * subject.number + subject.incarnation,
            "pause": self.pause,
            "checkpoint_every": 10,
        }
        subject.incarnation += 1
        subject.busy = False
        subject.pid = self.nursery.start(order)
        self.note("start", subject, pid=subject.pid, incarnation=subject.incarnation)

    def note(self, event: str, subject: Subject | None, **fields: Any) -> None:
        """One line in ``faults.jsonl``."""
        who = None if subject is None else subject.number
        row = {"mono": round(time.monotonic(), 3), "event": event, "peer": who, **fields}
        self.log.append(row)
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def running(self) -> list[Subject]:
        return [subject for subject in self.subjects if subject.pid is not None]

    # ---- time ----

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do ``action`` so many seconds from now."""
        self.at(time.monotonic() + seconds, action)

    def at(self, mono: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (mono, next(self._number), action))

    def go_on(self, until: Callable[[], bool], deadline: float) -> bool:
        """Carry out what is due and hear who ended, until ``until`` holds; False when the deadline came first."""
        while not until():
            now = time.monotonic()
            if now >= deadline:
                return False
            while self._due and self._due[0][0] <= now:
                heapq.heappop(self._due)[2]()
            wait = min([deadline, now + 0.2, *(due[0] for due in self._due[:1])]) - time.monotonic()
            ended = self.nursery.ended(wait)
            if ended is not None and ended["event"] == "ended":
                self._ended(int(ended["pid"]), int(ended["code"]))
        return True

    def _ended(self, pid: int, code: int) -> None:
        subject = next((one for one in self.subjects if one.pid == pid), None)
        if subject is None:
            return
        subject.pid, subject.held = None, []
        expected = code in subject.expected
        self.note("ended", subject, pid=pid, code=code, expected=expected)
        subject.expected.clear()
        if not expected:
            self.surprises.append(f"{subject.name} ended by itself with code {code}: {_last_words(subject)}")
        if not subject.busy and not self.ending:
            self.after(1.0, lambda: self.start(subject))

    # ---- watching ----

    def sample_forever(self) -> None:
        """Look at every worker and daemon now and then."""
        for subject in self.running():
            if subject.held or subject.pid is None:
                continue
            for kind, pid in (("peer", subject.pid), ("daemon", daemon_of(subject.pid))):
                found = None if pid is None else usage(pid)
                if found is not None:
                    row = {"mono": time.monotonic(), "kind": kind, "peer": subject.number, "pid": pid}
                    fields = {"rss": found.rss, "anonymous": found.anonymous, "fds": found.fds}
                    self.samples.append({**row, **fields, "threads": found.threads})
                    self._samples.write(json.dumps(self.samples[-1]) + "\n")
        self.after(SAMPLE_EVERY, self.sample_forever)

    # ---- the end ----

    def end(self) -> None:
        """Ask all to leave; who does not within its time is a finding and is killed."""
        self.ending = True
        self._due.clear()
        for subject in self.running():
            subject.let_go()
            subject.expected.add(0)
            assert subject.pid is not None
            send(subject.pid, signal.SIGTERM)
        if not self.go_on(lambda: not self.running(), time.monotonic() + LEAVING):
            for subject in self.running():
                self.surprises.append(f"{subject.name} did not leave within {LEAVING:g} s")
                subject.kill()
            self.go_on(lambda: not self.running(), time.monotonic() + 5.0)
        self._file.close()
        self._samples.close()

    def keep(self) -> None:
        """Copy what small disks hold before they are unmounted."""
        for subject in self.subjects:
            if subject.small_disk:
                names = shutil.ignore_patterns("ballast", "identity.key")
                shutil.copytree(subject.folder, self.folder / "kept" / subject.name, ignore=names, dirs_exist_ok=True)


def _last_words(subject: Subject) -> str:
    lines = [line for line in (subject.folder / "log.txt").read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines[-40:] if line.startswith("error:")]
    return (errors or lines or ["no word"])[-1][:400]
