"""Inner optimizers in real training loops: what an averaging one contributes and keeps; the swarms of two methods."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from decentral.manifest import Manifest
from decentral.peer import Peer
from decentral.training.copies import Averages
from decentral.training.inner import build_inner
from tests.kit.problems import Problem, Swarm, alone, run_terms

AVERAGING = pytest.mark.parametrize("name", ["gpa", "schedule_free"])
PLAIN = {"outer": {"learning_rate": 1.0, "momentum": 0.0, "norm_clip": None}, "compressor": {"chain": "none"}}
LIVELY = {"learning_rate": 0.02, "weight_decay": 0.0, "warmup": 0}


class Loop(Problem):
    """The problem under the manifest's optimizers."""

    def __init__(self, manifest: Manifest, seed: int = 0) -> None:
        super().__init__(seed)
        self.optimizer = build_inner(manifest.inner, self.model)  # type: ignore[assignment]

    def step(self) -> float:
        loss = self.loss(self.batch())
        loss.backward()
        for optimizer in self.optimizer:
            optimizer.step()
        self.model.zero_grad()
        return loss.item()

    def learnt(self) -> Tensor:
        """What the optimizers learn; training goes on as before."""
        averages = Averages(self.optimizer)
        averages.show()
        held = self.flat()
        averages.resume()
        return held


def anchor_of(peer: Peer) -> Tensor:
    return torch.cat(peer.anchor())


@AVERAGING
def test_what_is_contributed_and_becomes_the_anchor_is_the_average_and_not_what_trains(name: str, tmp_path: Path):
    manifest = run_terms("diloco", run={"rounds": 2}, inner={"optimizer": name, "steps": 5, **LIVELY}, **PLAIN)
    loop, twin = Loop(manifest), Loop(manifest)
    with alone(tmp_path, manifest, loop) as peer:
        for _ in range(5):
            loop.step()
            twin.step()
        assert peer.round == 1
        torch.testing.assert_close(anchor_of(peer), twin.learnt(), rtol=1e-4, atol=1e-5)
        assert float((anchor_of(peer) - twin.flat()).norm()) > 1e-2, "y is elsewhere"
        torch.testing.assert_close(loop.flat(), twin.flat(), rtol=1e-4, atol=1e-5)
        while not peer.done:
            loop.step()
        last = anchor_of(peer)
        assert torch.equal(loop.flat(), last), "the run is over: what it made is in the model"
    assert torch.equal(loop.flat(), last)


@AVERAGING
def test_a_method_that_looks_at_the_parameters_before_a_step_lets_the_step_go_by_what_trains(name: str, tmp_path: Path):
    """The parameters held the average when the step began, which both optimizers refuse."""
    manifest = run_terms("partial_updates", run={"rounds": 2}, inner={"optimizer": name, "steps": 5, **LIVELY})
    loop = Loop(manifest)
    with alone(tmp_path, manifest, loop) as peer:
        before_N = anchor_of(peer)
        for _ in range(4):
            loop.step()
        halves = (loop.flat() != before_N).chunk(2)  # as of y, where gradients are taken
        still, trained = sorted(int(half.sum()) for half in halves)
        assert still == 0, "what others train does not move"
        assert trained == len(before_N) // 2
        while not peer.done:
            loop.step()
        assert torch.equal(loop.flat(), anchor_of(peer))


@AVERAGING
def test_an_expert_of_another_peer_stands_still_where_gradients_are_taken(name: str, tmp_path: Path):
    manifest = run_terms("spes", run={"rounds": 2}, inner={"optimizer": name, "steps": 50, **LIVELY})
    loop = Loop(manifest)
    loop.model = model = torch.nn.Module()  # type: ignore[assignment]
    model.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
    loop.optimizer = build_inner(manifest.inner, model)
    with alone(tmp_path, manifest, loop) as peer:
        peer._part.loop.schedule.live.own(0)["place"] = torch.tensor([0.0, 2.0])  # type: ignore[union-attr]
        before = [expert.weight.detach().clone() for expert in model.experts]
        for _ in range(4):
            sum(expert(torch.ones(2, 4)).square().sum() for expert in model.experts).backward()
            for optimizer in loop.optimizer:
                optimizer.step()
        mine, other = (expert.weight != was for expert, was in zip(model.experts, before, strict=True))
        assert mine.all()
        assert not other.any()


@AVERAGING
def test_a_peer_that_is_restarted_between_two_rounds_goes_on_as_if_it_had_not_been(name: str, tmp_path: Path):
    manifest = run_terms("diloco", run={"rounds": 3}, inner={"optimizer": name, "steps": 4, **LIVELY}, **PLAIN)
    whole, first = Loop(manifest), Loop(manifest)
    with alone(tmp_path / "whole", manifest, whole) as peer:
        for _ in range(9):
            whole.step()
    with alone(tmp_path / "cut", manifest, first) as peer:
        for _ in range(6):
            first.step()
    again = Loop(manifest, seed=1)
    again.data.set_state(first.data.get_state())
    with alone(tmp_path / "cut", manifest, again) as peer:
        assert peer.inner_steps == 6
        for _ in range(3):
            again.step()
    torch.testing.assert_close(again.flat(), whole.flat(), rtol=1e-4, atol=1e-5)
    for (_, mine), (_, theirs) in zip(again.optimizer[0].state.items(), whole.optimizer[0].state.items(), strict=True):
        torch.testing.assert_close(mine["z"], theirs["z"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("preset", "moments"), [("muloco", {"momentum_buffer"}), ("mt_dao", {"exp_avg", "exp_avg_sq"})]
)
def test_three_peers_of_a_preset_agree_and_learn_by_its_inner_optimizer(preset: str, moments: set[str], tmp_path: Path):
    manifest = run_terms(preset, run={"rounds": 4}, inner=LIVELY)
    swarm = Swarm(manifest, tmp_path, *(Loop(manifest, number) for number in range(3)), require_peers=0).ends_alike()
    assert all(losses[-1] < 0.9 * losses[0] for losses in swarm.losses.values())
    states = [state for loop in swarm.problems for one in loop.optimizer for state in one.state.values()]
    assert all(moments <= set(state) for state in states)
