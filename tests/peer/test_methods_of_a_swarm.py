"""The three methods that ask most of a swarm, in real training loops: one peer is killed, and one joins late."""

from __future__ import annotations

import multiprocessing
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decentral.consensus.chain import contributions
from decentral.manifest import Manifest
from decentral.peer import Peer, join
from decentral.replica.replica import Replica
from decentral.state.journal import Journal
from decentral.wire.messages import Commit, Record, decode
from tests.peer.test_join import LOOPBACK, Problem, run_terms, run_together

FULL = 3  # members before one is killed, and again once the late one has joined
KILL_AT, HOLD_AT, ROUNDS = 3, 6, 14  # outer steps
MOMENTS = ("exp_avg", "exp_avg_sq")


def adam(seed: int, lr: float = 0.01) -> Problem:
    problem = Problem(seed)
    problem.optimizer = torch.optim.AdamW(problem.model.parameters(), lr=lr)
    return problem


def enter(manifest_or_invite: Manifest | str, problem: Problem, out: Path, **more: Any) -> Peer:
    settings: dict[str, Any] = {"listen": LOOPBACK, "transport": "native", "lan": False, "quiet": True}
    settings |= {"out": out, "require_peers": 0, "checkpoint_every": 1000, **more}  # the journal keeps all records
    return join(manifest_or_invite, problem.model, problem.optimizer, **settings, alone=True)


def train_until_killed(invite: str, out: Path, make: Callable[[int], Any]) -> None:
    problem = make(2)
    with enter(invite, problem, out) as peer:
        while not peer.done:
            problem.step()


def moments(problem: Problem) -> dict[str, torch.Tensor]:
    states = [problem.optimizer.state[parameter] for parameter in problem.model.parameters()]
    return {name: torch.cat([state[name].flatten() for state in states]) for name in MOMENTS if states[0]}


class Churn:
    """Two peers on threads and one in a process, which is killed; the two hold until a fourth is there."""

    def __init__(self, manifest: Manifest, folder: Path, late: Problem, make: Callable[[int], Any] = adam) -> None:
        self.manifest, self.folder, self.late, self.make = manifest, folder, late, make
        self.invited, self.killed, self.complete = threading.Event(), threading.Event(), threading.Event()
        self.invite = ""
        self.digests: dict[int, str] = {}
        self.losses: dict[int, list[float]] = {}
        self.after: dict[int, dict[int, dict[str, torch.Tensor]]] = {0: {}, 1: {}, 3: {}}  # peer -> rounds -> moments
        self.adopted: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = ({}, {})  # inner, shared
        self.replica: Replica | None = None
        self.late_peer = b""

    def run(self) -> None:
        run_together(lambda: self.stay(0), lambda: self.stay(1), self.kill_one, self.come_late, timeout=120.0)

    def stay(self, number: int) -> None:
        assert not number or self.invited.wait(60)
        problem = self.make(number)
        with enter(self.invite if number else self.manifest, problem, self.folder / f"peer{number}") as peer:
            if not number:
                self.invite = peer.invite
                self.invited.set()
            wait_until(lambda: len(peer.status().members) == FULL)
            self.train(number, peer, problem)
            self.replica = peer.swarm.node.replica

    def train(self, number: int, peer: Peer, problem: Problem) -> None:
        losses = self.losses.setdefault(number, [])
        while not peer.done:
            before = peer.round
            losses.append(problem.step())
            if peer.round == before + 1:
                self.after[number][peer.round] = moments(problem)
            if peer.round >= KILL_AT:
                self.killed.wait(60)
            if peer.round >= HOLD_AT:
                self.complete.wait(60)
        self.digests[number] = peer.anchor_digest

    def kill_one(self) -> None:
        assert self.invited.wait(60)
        context = multiprocessing.get_context("spawn")
        given = (self.invite, self.folder / "peer2", self.make)
        process = context.Process(target=train_until_killed, args=given, daemon=True)
        process.start()
        wait_until(lambda: any(rounds and max(rounds) >= KILL_AT for rounds in self.after.values()))
        process.kill()
        process.join()
        self.killed.set()

    def come_late(self) -> None:
        assert self.killed.wait(90)
        wait_until(lambda: all(self.after[n] and max(self.after[n]) >= HOLD_AT for n in (0, 1)))
        with enter(self.invite, self.late, self.folder / "peer3") as peer:
            self.late_peer = peer.swarm.node.driver.me
            wait_until(lambda: len(peer.status().members) == FULL)
            self.late.step()
            shared = peer.swarm.node.replica.states[0]
            self.adopted = (moments(self.late), {name: shared[name] for name in MOMENTS if name in shared})
            self.complete.set()
            self.train(3, peer, self.late)

    def weighed(self) -> list[dict[bytes, tuple[float, float]]]:
        """The norm that each record's contributors stated, and what they would count today."""
        assert self.replica is not None
        found = []
        for record in records_of(self.folder / "peer0"):
            refs = contributions(record)
            weights = self.replica.weights(refs, record.outer_step)
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


def wait_until(holds: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(900):
        if holds():
            return
        pause.wait(0.1)
    raise AssertionError("it did not come to that in 90 s")


def churn(
    preset: str,
    folder: Path,
    late: Any | None = None,
    make: Callable[[int], Any] = adam,
    **tables: dict[str, Any],
) -> Churn:
    limits = {"lease": 3.0, "shrink_after": 6.0}
    terms = run_terms(preset, run={"rounds": ROUNDS}, swarm=limits, **tables)
    made = Churn(terms, folder, make(3) if late is None else late, make)
    made.run()
    return made


def test_moments_are_averaged_and_a_joiner_begins_with_the_means(tmp_path):
    swarm = churn("des_loc", tmp_path)
    swarm.check(0, 1, 3)
    inner, shared = swarm.adopted
    assert set(inner) == set(shared) == set(MOMENTS)
    assert all(shared[name].any() and torch.equal(inner[name], shared[name]) for name in MOMENTS)
    for every, name in ((3, "exp_avg"), (6, "exp_avg_sq")):
        due = [r for r in range(every, ROUNDS + 1, every) if all(r in swarm.after[n] for n in (0, 1))]
        assert due, "both saw a round that averages"
        assert all(torch.equal(swarm.after[0][r][name], swarm.after[1][r][name]) for r in due)
    apart = [r for r in range(1, ROUNDS) if r % 3 and all(r in swarm.after[n] for n in (0, 1))]
    assert not any(torch.equal(swarm.after[0][r]["exp_avg"], swarm.after[1][r]["exp_avg"]) for r in apart)


@pytest.mark.long
def test_an_asynchronous_run_outlives_a_kill_and_a_joiner(tmp_path):
    swarm = churn("delayed_nesterov", tmp_path, outer={"grace": 0.5})
    swarm.check(0, 1, 3)


@pytest.mark.long
def test_a_peer_with_a_thousandfold_learning_rate_counts_nothing_after_the_warm_up(tmp_path):
    swarm = churn("edit", tmp_path, adam(3, lr=10.0), outer={"warmup": 6})
    swarm.check(0, 1)
    told = [(record[swarm.late_peer], record) for record in swarm.weighed() if swarm.late_peer in record]
    wild = [(weight, record) for (norm, weight), record in told if norm > 20]  # of the others it is 1 to 5
    assert wild, "what it made in time is not shortened"
    assert all(weight == 0.0 for weight, _ in wild)
    assert all(weight > 0 for _, record in wild for peer, (_, weight) in record.items() if peer != swarm.late_peer)


def test_a_slow_peer_holds_up_no_round_and_what_it_brings_late_counts(tmp_path):
    """Two of three are a quorum; six inner steps of the third take as long as three to five rounds of the others."""
    manifest = run_terms("delayed_nesterov", run={"rounds": 16}, outer={"grace": 0.05})
    invited, invite, brought = threading.Event(), [], [0]  # the round after which the slow one contributed last
    digests: dict[int, str] = {}

    def body(number: int) -> None:
        assert not number or invited.wait(60)
        problem = adam(number)
        with enter(invite[0] if number else manifest, problem, tmp_path / f"peer{number}") as peer:
            if not number:
                invite.append(peer.invite)
                invited.set()
            wait_until(lambda: len(peer.status().members) == FULL)
            while not peer.done:
                for _ in range(manifest.inner.steps - 1):
                    problem.step()
                if number < 2:
                    wait_until(lambda: peer.done or peer.status().round < brought[0] + 5)
                else:
                    wait_until(lambda: peer.done or peer.status().round >= brought[0] + 3)
                    brought[0] = peer.status().round
                problem.step()
            digests[number] = peer.anchor_digest

    run_together(*(lambda n=n: body(n) for n in range(FULL)))
    assert len(set(digests.values())) == 1
    records = records_of(tmp_path / "peer0")
    ages = [record.outer_step - ref.based for record in records for ref in contributions(record)]
    without = [record for record in records if len(contributions(record)) == 2]
    assert len(without) >= len(records) // 2, "two go on without the third"
    assert min(ages) == 0
    assert 0 < max(ages) <= 8
