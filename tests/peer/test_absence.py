"""Peers that come back: what they bring, what they say, and what NaN does to one, through `join`."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import decentral
from decentral.errors import NonFiniteError
from decentral.peer import Peer
from decentral.state.checkpoint import load_newest
from tests.kit.churn import MOMENTS, moments
from tests.kit.patience import until
from tests.kit.problems import Problem, Swarm, adam, alone, contributed, poison, run_terms, run_together, told, train
from tests.kit.tables import PRESETS, SYNCHRONOUS, WIRES, covering, long_but, rows_but

FEW = covering(WIRES)
LEARNT = tuple(name for name in PRESETS if name not in ("spes", "variance_corrected"))  # no experts; founds no run


@pytest.mark.parametrize("preset", long_but(["sparseloco"], ["diloco", "sparseloco", "noloco"]))
def test_a_peer_that_was_paused_for_long_starts_from_what_the_others_have_and_says_so(tmp_path, preset):
    manifest = run_terms(preset, run={"rounds": 10**6}, inner={"steps": 2})  # nobody is at the end before all are there
    swarm = Swarm(manifest, tmp_path, Problem(0), Problem(1))
    left_at, back, over = list[int](), threading.Event(), threading.Event()
    earlier = list[dict[str, Any]]()  # while it was joining, say

    def stays() -> None:
        with swarm.enters(0) as peer:
            while not over.is_set():
                swarm.problems[0].step()
                if left_at and peer.round > left_at[0] + 8:
                    back.set()

    def comes_back() -> None:
        step = swarm.problems[1].step
        try:
            with swarm.enters(1) as peer:
                events = swarm.events[1]
                until(lambda: contributed(events) >= 2, step)
                peer.pause()
                left_at.append(peer.round)
                until(back.is_set, step)
                before, earlier[:] = contributed(events), told(events, "away")
                peer.resume()
                until(lambda: contributed(events) >= before + 2, step)
        finally:
            over.set()

    run_together(stays, comes_back)
    away = told(swarm.events[1], "away")[len(earlier)]
    assert away["counted"] == 0
    assert away["steps"] > manifest.inner.steps


# A pair is waited for, so that gossip has no overlap.
WAITED = [(preset, overlap) for preset in LEARNT for overlap in (0, 1)[: 1 + (preset in SYNCHRONOUS)]]


@pytest.mark.parametrize(("preset", "overlap"), rows_but([*zip(FEW, (0, 1) * 3, strict=True), ("noloco", 0)], WAITED))
def test_nan_ends_the_loop_with_the_same_sentence_whether_the_round_is_waited_for_or_not(tmp_path, preset, overlap):
    manifest = run_terms(preset, run={"rounds": 1000}, outer={"overlap": overlap})
    problem, sentence = Problem(0), r"NaN or Inf in the pseudo-gradient of \S*weight; nothing"

    with pytest.raises(NonFiniteError, match=sentence), alone(tmp_path, manifest, problem) as peer:  # noqa: PT012
        train(peer, problem, rounds=2)
        poison(problem)
        train(peer, problem)


@pytest.mark.parametrize("preset", long_but(FEW, LEARNT))
def test_nan_puts_the_live_model_back_to_the_anchor_when_the_user_says_so(tmp_path, preset):
    problem, events = adam(0), []
    manifest = run_terms(preset, run={"rounds": 1000})
    with alone(tmp_path, manifest, problem, on_nan="restart", observer=events.append) as peer:
        train(peer, problem, rounds=2)
        poison(problem)
        until(lambda: told(events, "restarted"), problem.step)
        assert bool(torch.isfinite(problem.flat()).all())
        train(peer, problem, rounds=peer.round + 2)
        assert bool(torch.isfinite(problem.flat()).all())
    assert "pseudo-gradient of" in told(events, "restarted")[0]["why"]
    moments = [value for state in problem.optimizer.state.values() for value in state.values()]
    assert all(bool(torch.isfinite(value).all()) for value in moments)


def test_nan_again_and_again_ends_even_a_peer_that_restarts(tmp_path):
    problem = Problem(0, lr=float("nan"))
    peer = alone(tmp_path, run_terms("sparseloco"), problem, on_nan="restart")
    with pytest.raises(NonFiniteError), peer:
        train(peer, problem)


def test_a_restart_counts_the_steps_that_its_checkpoint_holds(tmp_path):
    manifest = run_terms("sparseloco", run={"rounds": 1000}, inner={"steps": 100})
    problem = Problem(0)
    with alone(tmp_path, manifest, problem) as peer:
        for _ in range(7):
            problem.step()
    again = Problem(0)
    with alone(tmp_path, manifest, again) as peer:
        assert peer.inner_steps == 7
        assert peer._begun.loop.schedule.progress[0].steps == 7


def test_a_model_in_bfloat16_does_not_drift_while_nobody_trains(tmp_path):
    problem = Problem(0, lr=0.0)
    problem.model.to(torch.bfloat16)
    tables = {"outer": {"learning_rate": 0.7}, "compressor": {"chain": "none", "feedback": "none"}}
    manifest = run_terms("sparseloco", run={"rounds": 30}, inner={"steps": 1}, **tables)
    with alone(tmp_path, manifest, problem) as peer:
        with torch.no_grad():  # learnt once: from then on the anchor is no number of bfloat16's
            problem.model.head.weight += 0.01
        train(peer, problem, rounds=20)
        before = [anchor.clone() for anchor in peer.anchor()]
        train(peer, problem)
        after = peer.anchor()
    for one, other in zip(before, after, strict=True):
        assert float((one - other).abs().max()) < 1e-6


def test_a_peer_that_tells_no_tokens_is_refused_where_tokens_weigh(tmp_path):
    problem = Problem(0)
    manifest = run_terms("sparseloco", outer={"weighting": "tokens"})
    with pytest.raises(decentral.ConfigError, match=r"tokens_per_step=0.*a sixteenth of the others"):
        alone(tmp_path, manifest, problem)


def test_ctrl_c_during_a_swap_saves_what_came_of_it(tmp_path):
    """The pair was made after the checkpoint, which held the same progress again."""
    problem = Problem(0)
    manifest = run_terms("noloco", run={"rounds": 1000}, inner={"steps": 2})

    class Interrupted:
        """Ctrl-C while the outcome is waited for."""

        def __init__(self, outcome: Any) -> None:
            self.outcome, self.waits = outcome, 0

        def result(self, within: float | None = None) -> Any:
            self.waits += 1
            if self.waits == 1:
                raise KeyboardInterrupt
            return self.outcome.result(within)

    with pytest.raises(KeyboardInterrupt), alone(tmp_path, manifest, problem) as peer:  # noqa: PT012
        train(peer, problem, rounds=2)
        begin = peer.swarm.begin
        peer.swarm.begin = lambda *args: Interrupted(begin(*args))  # type: ignore[method-assign]
        train(peer, problem)
    saved = load_newest(tmp_path / "checkpoints")
    assert saved is not None
    assert saved.meta["gossip_step"] == peer.round == 3
    for fragment in range(manifest.outer.fragments):
        assert torch.equal(saved.tensors[f"live/{fragment}"], saved.tensors[f"anchor/{fragment}"])
    assert saved.meta["progress"]["fragments"][0]["steps"] == 0


# ---- the means of a run's moments, whatever became of its own ----


def shared(peer: Peer) -> dict[str, torch.Tensor]:
    return dict(peer.swarm.node.replica.states[0])


def test_a_peer_that_starts_over_after_nan_has_the_shared_means(tmp_path: Path) -> None:
    problem, events = adam(0), list[dict[str, object]]()
    rare = {"first_moment": 1000, "second_moment": 1000}
    manifest = run_terms("des_loc", run={"rounds": 1000}, outer=rare)
    with alone(tmp_path, manifest, problem, on_nan="restart", observer=events.append) as peer:
        train(peer, problem, rounds=1)
        states = peer.swarm.node.replica.states
        states[0] = {name: torch.full_like(mean_N, 0.5) for name, mean_N in states[0].items()}
        poison(problem)
        until(lambda: told(events, "restarted"), problem.step)
        problem.step()
        assert all(torch.equal(moments(problem)[name], shared(peer)[name]) for name in MOMENTS)


def test_a_peer_that_replays_its_journal_has_the_means_of_the_commits_that_it_replays(tmp_path: Path) -> None:
    manifest = run_terms("des_loc", run={"rounds": 1000}, outer={"first_moment": 1, "second_moment": 1})
    problem, crashed = adam(0), tmp_path / "crashed"
    with alone(tmp_path / "peer", manifest, problem, checkpoint_every=1000) as peer:
        train(peer, problem, rounds=3)
        shutil.copytree(tmp_path / "peer", crashed, ignore=shutil.ignore_patterns("*.sock", "*.lock"))
    again = adam(1)
    with alone(crashed, manifest, again, checkpoint_every=1000) as peer:
        means = shared(peer)
        assert all(mean_N.any() for mean_N in means.values())
        again.step()
        assert all(torch.equal(moments(again)[name], means[name]) for name in MOMENTS)
