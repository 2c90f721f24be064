"""Methods that ask most of a swarm, in real training loops: a peer is killed and one joins late, or one is slow."""

from __future__ import annotations

import statistics
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from decentral.consensus.chain import contributions
from decentral.manifest import Manifest
from decentral.manifest.terms import Model
from decentral.peer import Peer
from decentral.tasks.batches import batch_at
from decentral.tasks.language_model import build_language_model
from decentral.tasks.sizing import LanguageModelConfig
from tests.kit.churn import FULL, KEPT, MOMENTS, ROUNDS, churn, records_of
from tests.kit.patience import until
from tests.kit.problems import Problem, Swarm, adam, run_terms


@pytest.mark.long
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
    churn("delayed_nesterov", tmp_path, outer={"grace": 0.5}).check(0, 1, 3)


@pytest.mark.long
def test_a_peer_with_a_thousandfold_learning_rate_counts_nothing_after_the_warm_up(tmp_path):
    swarm = churn("edit", tmp_path, adam(3, lr=10.0), outer={"warmup": 6})
    swarm.check(0, 1)
    told = [(record[swarm.late_peer], record) for record in swarm.weighed() if swarm.late_peer in record]
    wild = [(weight, record) for (norm, weight), record in told if norm > 20]  # of the others it is 1 to 5
    assert wild, "what it made in time is not shortened"
    assert all(weight == 0.0 for weight, _ in wild)
    assert all(weight > 0 for _, record in wild for peer, (_, weight) in record.items() if peer != swarm.late_peer)


# ---- experts ----

EXPERTS, INTERVAL = 6, 6
TERMS = {"hidden": 16, "layers": 1, "heads": 2, "context": 16, "experts": EXPERTS}
TEXT = torch.frombuffer(bytearray(b"sphinx of black quartz, judge my vow. " * 60), dtype=torch.uint8)


class Reader:
    """The shipped model on a peer's own windows of a text; it notes which experts each step moved."""

    def __init__(self, seed: int) -> None:
        self.model = build_language_model(LanguageModelConfig.of(Model(**TERMS)), seed=0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.data, self.steps = bytes([seed]) * 32, 0
        self.moved: list[frozenset[int]] = []

    def step(self) -> float:
        before, self.steps = self.experts(), self.steps + 1
        batch = batch_at(TEXT, seed=0, peer=self.data, step=self.steps, batch_size=4, context=16)
        loss = self.model(**batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        apart = [(now != was).flatten(1).any(1) for now, was in zip(self.experts(), before, strict=True)]
        self.moved.append(frozenset(torch.stack(apart).any(0).nonzero().flatten().tolist()))
        return float(loss.detach())

    def experts(self) -> list[torch.Tensor]:
        return [p.detach().clone() for name, p in self.model.named_parameters() if ".experts." in name]


@pytest.mark.long
def test_experts_change_hands_when_one_peer_is_killed_and_another_comes(tmp_path: Path):
    late = Reader(3)
    swarm = churn("spes", tmp_path, late, Reader, model=TERMS, inner={"steps": INTERVAL})
    swarm.check(0, 1)
    records = records_of(tmp_path / "peer0")
    said = [[struct.unpack("<HH", ref.summary) for ref in contributions(record)] for record in records]
    assert [(place, FULL) for place in range(FULL)] in said[: len(said) // 2], "before the kill three shared them out"
    assert [(place, FULL) for place in range(FULL)] in said[len(said) // 2 :], "and so did those who came after"
    took = [[ref.peer for ref in contributions(record)] for record in records]
    peers = [one for one in took[:-1] if swarm.late_peer in one][-1]  # the last commit ends the run
    place, owners = peers.index(swarm.late_peer), len(peers)
    last = late.moved[-INTERVAL:-1]  # the last step of a round is merged into what the others learnt
    assert last == [frozenset(range(place, EXPERTS, owners))] * len(last)
    assert late.moved[0] == frozenset(range(EXPERTS)), "whoever has no place yet trains all"


# ---- a slow peer ----


class Uneven(Swarm):
    """Three peers, of which each trains by ``loop``; ``names``: of their keys."""

    def __init__(
        self, manifest: Manifest, folder: Path, loop: Callable[[int, Peer, Problem], None], **given: object
    ) -> None:
        super().__init__(manifest, folder, *map(adam, range(FULL)), **KEPT, **given)
        self.loop, self.names = loop, dict[int, bytes]()

    def trains(self, number: int, peer: Peer) -> None:
        self.names[number] = peer.swarm.node.driver.state.me
        while not peer.done:
            self.loop(number, peer, self.problems[number])


def test_a_slow_peer_holds_up_no_round_and_what_it_brings_late_counts(tmp_path):
    """Two of three are a quorum; six inner steps of the third take as long as three to five rounds of the others."""
    manifest = run_terms("delayed_nesterov", run={"rounds": 16}, outer={"grace": 0.05})
    brought = 0  # the round after which the slow one contributed last

    def makes_a_round(number: int, peer: Peer, problem: Problem) -> None:
        nonlocal brought
        for _ in range(manifest.inner.steps - 1):
            problem.step()
        if number < 2:
            until(lambda: peer.done or peer.status().round < brought + 5)
        else:
            until(lambda: peer.done or peer.status().round >= brought + 3)
            brought = peer.status().round
        problem.step()

    Uneven(manifest, tmp_path, makes_a_round).ends_alike()
    records = records_of(tmp_path / "peer0")
    ages = [record.outer_step - ref.based for record in records for ref in contributions(record)]
    without = [record for record in records if len(contributions(record)) == 2]
    assert len(without) >= len(records) // 2, "two go on without the third"
    assert min(ages) == 0
    assert 0 < max(ages) <= 8


@pytest.mark.long
def test_a_slow_peer_makes_fewer_steps_instead_of_holding_up_the_others_or_being_late(tmp_path):
    rounds, beside = 8, 0.02  # s beside each inner step
    slower = 5  # times what a step and that take on the very machine: a busy one makes it slower by as much
    limits = {"deadline_floor": 15.0, "deadline_ceiling": 30.0, "lease": 20.0, "shrink_after": 30.0}
    manifest = run_terms("diloco", run={"rounds": rounds}, inner={"steps": 8, "pace": "speed"}, swarm=limits)
    took, wait = list[float](), threading.Event().wait  # some of them with a round that was waited for

    def makes_a_step(number: int, peer: Peer, problem: Problem) -> None:
        began = time.monotonic()
        problem.step()
        wait(beside)
        if number == 2:
            took.append(time.monotonic() - began)
            wait((slower - 1) * statistics.median(took))

    swarm = Uneven(manifest, tmp_path, makes_a_step, tokens_per_step=5).ends_alike()
    said = [{ref.peer: ref for ref in contributions(record)} for record in records_of(tmp_path / "peer0")]
    all_of_them = [record for record in said if set(record) == set(swarm.names.values())]
    assert len(all_of_them) >= rounds - 3, "it is in the rounds of the others"
    made = {n: sum(record[name].steps for record in all_of_them) for n, name in swarm.names.items()}
    assert made[2] < 0.75 * min(made[0], made[1])
    assert made[2] >= len(all_of_them)
    assert all(ref.tokens == 5 * ref.steps for record in all_of_them for ref in record.values()), "by what it made"
