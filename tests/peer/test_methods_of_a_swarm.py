"""The three methods that ask most of a swarm, in real training loops: one peer is killed, and one joins late."""

from __future__ import annotations

import threading

import pytest
import torch

from decentral.consensus.chain import contributions
from tests.kit.churn import FULL, MOMENTS, ROUNDS, adam, churn, enter, records_of, wait_until
from tests.kit.problems import run_terms, run_together


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
