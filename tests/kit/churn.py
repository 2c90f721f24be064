"""Three real peers of which one is killed, leaves or comes late while a method trains."""

from __future__ import annotations

import multiprocessing
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from decentral.consensus.chain import contributions
from decentral.manifest import Manifest
from decentral.peer import Peer
from decentral.replica.apply import slice_weights
from decentral.replica.replica import Replica
from decentral.state.journal import Journal
from decentral.wire.messages import Commit, Record, decode
from tests.kit.patience import PATIENCE, until
from tests.kit.problems import Problem, Swarm, adam, joined, run_terms, run_together

FULL = 3  # members before one is killed, and again once the late one has joined
KILL_AT, HOLD_AT, ROUNDS = 3, 6, 14  # outer steps
MOMENTS = ("exp_avg", "exp_avg_sq")
KEPT = {"require_peers": 0, "checkpoint_every": 1000}  # the journal keeps all records


def train_until_killed(invite: str, out: Path, make: Callable[[int], Any]) -> None:
    problem = make(2)
    with joined(invite, problem, out, **KEPT) as peer:
        while not peer.done:
            problem.step()


def moments(problem: Problem) -> dict[str, torch.Tensor]:
    states = [problem.optimizer.state[parameter] for parameter in problem.model.parameters()]
    return {name: torch.cat([state[name].flatten() for state in states]) for name in MOMENTS if states[0]}


class Churn(Swarm):
    """Two peers on threads and one in a process, which is killed; the two hold until a fourth is there."""

    def __init__(self, manifest: Manifest, folder: Path, late: Any, make: Callable[[int], Any] = adam) -> None:
        super().__init__(manifest, folder, make(0), make(1), None, late, **KEPT)
        self.late, self.make = late, make
        self.killed, self.complete = threading.Event(), threading.Event()
        self.after: dict[int, dict[int, dict[str, torch.Tensor]]] = {0: {}, 1: {}, 3: {}}  # peer -> rounds -> moments
        self.adopted: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = ({}, {})  # inner, shared
        self.replica: Replica | None = None
        self.late_peer = b""

    def run(self, timeout: float = PATIENCE) -> Churn:
        bodies = (lambda: self.peer(0), lambda: self.peer(1), self.kill_one, self.come_late)
        run_together(*bodies, timeout=timeout)
        return self

    def meets(self, peer: Peer) -> None:
        until(lambda: len(peer.status().members) == FULL)

    def trains(self, number: int, peer: Peer) -> None:
        losses, problem = self.losses.setdefault(number, []), self.problems[number]
        while not peer.done:
            before = peer.round
            losses.append(problem.step())
            if peer.round == before + 1:
                self.after[number][peer.round] = moments(problem)
            if peer.round >= KILL_AT:
                self.killed.wait(PATIENCE)
            if peer.round >= HOLD_AT:
                self.complete.wait(PATIENCE)
        self.replica = peer.swarm.node.replica

    def kill_one(self) -> None:
        assert self.invited.wait(PATIENCE)
        context = multiprocessing.get_context("spawn")
        given = (self.invite, self.folder / "peer2", self.make)
        process = context.Process(target=train_until_killed, args=given, daemon=True)
        process.start()
        until(lambda: any(rounds and max(rounds) >= KILL_AT for rounds in self.after.values()))
        process.kill()
        process.join()
        self.killed.set()

    def come_late(self) -> None:
        assert self.killed.wait(PATIENCE)
        until(lambda: all(self.after[n] and max(self.after[n]) >= HOLD_AT for n in (0, 1)))
        with self.enters(3) as peer:
            self.late_peer = peer.swarm.node.driver.state.me
            self.meets(peer)
            self.late.step()
            shared = peer.swarm.node.replica.states[0]
            self.adopted = (moments(self.late), {name: shared[name] for name in MOMENTS if name in shared})
            self.complete.set()
            self.trains(3, peer)
            self.digests[3] = peer.anchor_digest

    def weighed(self) -> list[dict[bytes, tuple[float, float]]]:
        """The norm that each record's contributors stated, and what they would count today."""
        assert self.replica is not None
        found = []
        for record in records_of(self.folder / "peer0"):
            refs = contributions(record)
            weights = slice_weights(self.replica, refs, record.outer_step)
            norms = [struct.unpack("<d", ref.summary)[0] for ref in refs]
            found.append({ref.peer: told for ref, told in zip(refs, zip(norms, weights, strict=True), strict=True)})
        return found

    def check(self, *learners: int) -> None:
        assert len(set(self.digests.values())) == 1
        assert set(self.digests) == {0, 1, 3}
        for number in learners:
            assert self.losses[number][-1] < 0.5 * self.losses[0][0]
        named = [{ref.peer for ref in contributions(record)} for record in records_of(self.folder / "peer0")]
        assert len(set.union(*named)) == FULL + 1, "the one that was killed and the one that came late contributed"


def records_of(out: Path) -> list[Record]:
    with Journal(out / "journal") as journal:
        commits = [decode(entry) for entry in journal.entries]
    return [commit.record for commit in commits if isinstance(commit, Commit) and contributions(commit.record)]


def churn(
    preset: str, folder: Path, late: Any | None = None, make: Callable[[int], Any] = adam, **tables: dict[str, Any]
) -> Churn:
    limits = {"lease": 3.0, "shrink_after": 6.0}
    terms = run_terms(preset, run={"rounds": ROUNDS}, swarm=limits, **tables)
    return Churn(terms, folder, make(3) if late is None else late, make).run()
