"""The inner optimizer has the means of a run's moments, whatever became of its own: after NaN, a crash, an absence."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from decentral.peer import Peer
from tests.kit.absent import alone, poison, told, until
from tests.kit.problems import Problem, run_terms

MOMENTS = ("exp_avg", "exp_avg_sq")


def adam(seed: int = 0) -> Problem:
    problem = Problem(seed)
    problem.optimizer = torch.optim.AdamW(problem.model.parameters(), lr=0.01)  # type: ignore[assignment]
    return problem


def moments(problem: Problem, name: str) -> torch.Tensor:
    return torch.cat([problem.optimizer.state[p][name].flatten() for p in problem.model.parameters()])


def shared(peer: Peer) -> dict[str, torch.Tensor]:
    return dict(peer.swarm.node.replica.states[0])


def test_a_peer_that_starts_over_after_nan_has_the_shared_means(tmp_path: Path) -> None:
    problem, events = adam(), list[dict[str, object]]()
    rare = {"first_moment": 1000, "second_moment": 1000}
    manifest = run_terms("des_loc", run={"rounds": 1000}, outer=rare)
    with alone(tmp_path, manifest, problem, on_nan="restart", observer=events.append) as peer:
        until(lambda: peer.round >= 1, problem)
        states = peer.swarm.node.replica.states
        states[0] = {name: torch.full_like(mean_N, 0.5) for name, mean_N in states[0].items()}
        poison(problem)
        until(lambda: bool(told(events, "restarted")), problem)
        problem.step()
        assert all(torch.equal(moments(problem, name), shared(peer)[name]) for name in MOMENTS)


def test_a_peer_that_replays_its_journal_has_the_means_of_the_commits_that_it_replays(tmp_path: Path) -> None:
    manifest = run_terms("des_loc", run={"rounds": 1000}, outer={"first_moment": 1, "second_moment": 1})
    problem, crashed = adam(), tmp_path / "crashed"
    with alone(tmp_path / "peer", manifest, problem, checkpoint_every=1000) as peer:
        until(lambda: peer.round >= 3, problem)
        shutil.copytree(tmp_path / "peer", crashed, ignore=shutil.ignore_patterns("*.sock", "*.lock"))
    again = adam(1)
    with alone(crashed, manifest, again, checkpoint_every=1000) as peer:
        means = shared(peer)
        assert all(mean_N.any() for mean_N in means.values())
        again.step()
        assert all(torch.equal(moments(again, name), means[name]) for name in MOMENTS)
