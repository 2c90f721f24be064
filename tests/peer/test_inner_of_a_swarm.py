"""Inner optimizers in real training loops: what an averaging one contributes and keeps; the swarms of two methods."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decentral.manifest import Manifest
from decentral.peer import Peer, join
from decentral.swarm.identity import Identity
from decentral.training.copies import Averages
from decentral.training.inner import build_inner
from decentral.transport.memory import MemoryNetwork
from tests.kit.problems import LOOPBACK, Problem, run_terms, run_together

AVERAGING = pytest.mark.parametrize("name", ["gpa", "schedule_free"])
PLAIN = {"outer": {"learning_rate": 1.0, "momentum": 0.0, "norm_clip": None}, "compressor": {"chain": "none"}}
LIVELY = {"learning_rate": 0.02, "weight_decay": 0.0, "warmup": 0}


class Loop:
    """A model under the manifest's optimizers, and the steps of a peer's own data."""

    def __init__(self, manifest: Manifest, seed: int = 0) -> None:
        self.problem = Problem(seed)
        self.optimizers = build_inner(manifest.inner, self.problem.model)

    def step(self) -> float:
        inputs = torch.randn(32, 64, generator=self.problem.data)
        loss = (self.problem.model(inputs) - inputs @ self.problem.goal.T).square().mean()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self.problem.model.zero_grad()
        return loss.item()

    def learnt(self) -> Tensor:
        """What the optimizers learn; training goes on as before."""
        averages = Averages(self.optimizers)
        averages.show()
        held = self.problem.flat()
        averages.resume()
        return held


def alone(folder: Path, manifest: Manifest, loop: Loop) -> Peer:
    identity = Identity.load_or_create(folder / "identity.key")
    transport = MemoryNetwork().transport(identity.signer)
    return join(
        manifest,
        loop.problem.model,
        loop.optimizers,
        out=folder,
        transport=transport,
        lan=False,
        quiet=True,
        commands=False,
        alone=True,
    )


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
        assert float((anchor_of(peer) - twin.problem.flat()).norm()) > 1e-2, "y is elsewhere"
        torch.testing.assert_close(loop.problem.flat(), twin.problem.flat(), rtol=1e-4, atol=1e-5)
        while not peer.done:
            loop.step()
        last = anchor_of(peer)
        assert torch.equal(loop.problem.flat(), last), "the run is over: what it made is in the model"
    assert torch.equal(loop.problem.flat(), last)


@AVERAGING
def test_a_method_that_looks_at_the_parameters_before_a_step_lets_the_step_go_by_what_trains(name: str, tmp_path: Path):
    """The parameters held the average when the step began, which both optimizers refuse."""
    manifest = run_terms("partial_updates", run={"rounds": 2}, inner={"optimizer": name, "steps": 5, **LIVELY})
    loop = Loop(manifest)
    with alone(tmp_path, manifest, loop) as peer:
        before_N = anchor_of(peer)
        for _ in range(4):
            loop.step()
        halves = (loop.problem.flat() != before_N).chunk(2)  # as of y, where gradients are taken
        still, trained = sorted(int(half.sum()) for half in halves)
        assert still == 0, "what others train does not move"
        assert trained == len(before_N) // 2
        while not peer.done:
            loop.step()
        assert torch.equal(loop.problem.flat(), anchor_of(peer))


@AVERAGING
def test_an_expert_of_another_peer_stands_still_where_gradients_are_taken(name: str, tmp_path: Path):
    manifest = run_terms("spes", run={"rounds": 2}, inner={"optimizer": name, "steps": 50, **LIVELY})
    loop = Loop(manifest)
    loop.problem.model = model = torch.nn.Module()  # type: ignore[assignment]
    model.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
    loop.optimizers = build_inner(manifest.inner, model)
    with alone(tmp_path, manifest, loop) as peer:
        peer._part.loop.schedule.live.own(0)["place"] = torch.tensor([0.0, 2.0])  # type: ignore[union-attr]
        before = [expert.weight.detach().clone() for expert in model.experts]
        for _ in range(4):
            sum(expert(torch.ones(2, 4)).square().sum() for expert in model.experts).backward()
            for optimizer in loop.optimizers:
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
    again.problem.data.set_state(first.problem.data.get_state())
    with alone(tmp_path / "cut", manifest, again) as peer:
        assert peer.inner_steps == 6
        for _ in range(3):
            again.step()
    torch.testing.assert_close(again.problem.flat(), whole.problem.flat(), rtol=1e-4, atol=1e-5)
    for (_, mine), (_, theirs) in zip(
        again.optimizers[0].state.items(), whole.optimizers[0].state.items(), strict=True
    ):
        torch.testing.assert_close(mine["z"], theirs["z"], rtol=1e-4, atol=1e-5)


class Swarm:
    """Three peers on threads, over the native transport on loopback."""

    def __init__(self, manifest: Manifest, folder: Path) -> None:
        self.manifest, self.folder, self.invited, self.invite = manifest, folder, threading.Event(), ""
        self.full = threading.Barrier(3, timeout=60)
        self.digests: list[str] = []
        self.losses: list[list[float]] = []
        self.states: list[list[set[str]]] = []

    def run(self) -> None:
        run_together(*(lambda n=n: self.peer(n) for n in range(3)), timeout=110.0)

    def peer(self, number: int) -> None:
        loop = Loop(self.manifest, number)
        assert not number or self.invited.wait(60)
        settings: dict[str, Any] = {"listen": LOOPBACK, "transport": "native", "lan": False, "quiet": True}
        settings |= {"out": self.folder / f"peer{number}", "require_peers": 0}
        with join(self.invite or self.manifest, loop.problem.model, loop.optimizers, **settings, alone=True) as peer:
            if not number:
                self.invite = peer.invite
                self.invited.set()
            peer.wait_for_company()
            self.full.wait()
            losses = []
            while not peer.done:
                losses.append(loop.step())
            self.losses.append(losses)
            self.digests.append(peer.anchor_digest)
            self.states.append([set(state) for optimizer in loop.optimizers for state in optimizer.state.values()])


@pytest.mark.parametrize(
    ("preset", "moments"), [("muloco", {"momentum_buffer"}), ("mt_dao", {"exp_avg", "exp_avg_sq"})]
)
def test_three_peers_of_a_preset_agree_and_learn_by_its_inner_optimizer(preset: str, moments: set[str], tmp_path: Path):
    swarm = Swarm(run_terms(preset, run={"rounds": 4}, inner=LIVELY), tmp_path)
    swarm.run()
    assert len(swarm.digests) == 3
    assert len(set(swarm.digests)) == 1
    assert all(losses[-1] < 0.9 * losses[0] for losses in swarm.losses)
    assert all(moments <= held for states in swarm.states for held in states)
