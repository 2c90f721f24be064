"""What a loop asks of the run: the agreed model by name, the same swapped in, and a call when a round has ended."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import decentral
from decentral.errors import ConfigError
from decentral.peer import Peer
from decentral.training.inner_optimizers import ScheduleFree
from tests.kit.problems import Problem, alone, run_terms


class Mixed(nn.Module):
    """Halves beside floats, a frozen part, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 4, bias=False, dtype=torch.bfloat16)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.drop = nn.Dropout(0.5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.head(self.drop(self.norm(self.body(inputs))).to(torch.bfloat16)).float())


def peer_of(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, **given: Any) -> Peer:
    terms = run_terms("diloco", model={"task": "custom"})
    return alone(folder, terms, SimpleNamespace(model=model, optimizer=optimizer), **given)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_agreed_model_has_the_names_shapes_and_dtypes_of_the_model_but_nothing_frozen(tmp_path: Path) -> None:
    model = Mixed()
    optimizer = sgd(model)
    with peer_of(tmp_path, torch.compile(model, backend="eager"), optimizer) as peer:
        begun = peer.agreed()
        wanted = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("frozen")}
        assert {name: (t.shape, t.dtype) for name, t in begun.items()} == {
            n: (t.shape, t.dtype) for n, t in wanted.items()
        }
        for _ in range(8):
            step(model, optimizer)
        agreed = peer.agreed()
        assert not equal(agreed, begun), "a round has moved it"
        assert not torch.equal(agreed["body.weight"], model.body.weight), "two steps beyond it"
        agreed["body.weight"].zero_()
        assert peer.agreed()["body.weight"].any(), "a copy"
        missing = model.load_state_dict(peer.agreed(), strict=False)
        assert not missing.unexpected_keys
        assert all(name.startswith("frozen") for name in missing.missing_keys)


@pytest.mark.parametrize("fails", [False, True], ids=["", "raises"])
def test_what_was_there_comes_back_bit_for_bit_after_an_evaluation_of_what_is_agreed(
    tmp_path: Path, fails: bool
) -> None:
    model = Mixed()
    optimizer = sgd(model)
    with peer_of(tmp_path, model, optimizer) as peer:
        for _ in range(8):
            step(model, optimizer)
        model.norm.eval()  # a mode of its own
        before, agreed, drawn = state_of(model), peer.agreed(), torch.get_rng_state()

        def evaluate() -> None:
            with peer.evaluating():
                inside = model.state_dict()
                assert all(torch.equal(inside[name], tensor) for name, tensor in agreed.items())
                assert not any(module.training for module in model.modules())
                assert not model(torch.randn(2, 8)).requires_grad
                model.train()(torch.randn(16, 8))  # which moves buffers
                if fails:
                    raise KeyError("mine")

        if fails:
            with pytest.raises(KeyError, match="mine"):
                evaluate()
        else:
            evaluate()
        assert equal(before, state_of(model))
        assert torch.equal(drawn, torch.get_rng_state())
        assert model.training
        assert model.drop.training
        assert not model.norm.training
        step(model, optimizer)


def test_a_teacher_comes_back_after_an_evaluation_of_what_is_agreed_and_a_buffer_may_be_gone(tmp_path: Path) -> None:
    model = Mixed()
    model.register_buffer("queue", torch.ones(3))
    optimizer = sgd(model)
    with peer_of(tmp_path, model, optimizer, moved=["frozen"]) as peer:
        for _ in range(8):
            step(model, optimizer)
            model.frozen = copy.deepcopy(model.frozen)  # another tensor, as of a target network
            with torch.no_grad():
                model.frozen.weight.mul_(0.9)
        before = state_of(model)
        with peer.evaluating():
            assert not torch.equal(model.frozen.weight, before["frozen.weight"]), "two steps before"
        assert equal(before, state_of(model))
        model.queue = None
        assert peer.agreed()["queue"].tolist() == [1, 1, 1]


def test_an_optimizer_that_trains_elsewhere_than_it_learns_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    ends = []
    for name, looks in (("a", False), ("b", True)):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
        optimizer = ScheduleFree(model.parameters(), lr=1e-2)
        with peer_of(tmp_path / name, model, optimizer) as peer:
            for _ in range(8):
                step(model, optimizer)
                if looks:
                    with peer.evaluating():
                        held = model.state_dict()
                        assert all(torch.equal(held[one], tensor) for one, tensor in peer.agreed().items())
            ends.append(torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]))
    assert torch.equal(*ends)


def test_an_evaluation_between_accumulated_gradients_is_no_change_of_the_parameters(tmp_path: Path) -> None:
    problem = Problem(0)
    with alone(tmp_path, run_terms("diloco"), problem) as peer:
        problem.step()
        for _ in range(4):
            loss = problem.model(torch.randn(4, 64)).square().mean()
            with peer.evaluating():
                pass
            loss.backward()
        problem.step()


def test_nothing_is_agreed_before_the_block(tmp_path: Path) -> None:
    peer = alone(tmp_path, run_terms("diloco"), Problem(0))
    with pytest.raises(ConfigError, match=r"peer.agreed: this peer has not entered the run"):
        peer.agreed()
    with pytest.raises(ConfigError, match=r"peer.evaluating: this peer"), peer.evaluating():
        pass
    with pytest.raises(ConfigError, match=r"peer.schedule: this peer"):
        peer.schedule(Problem(0).optimizer)


@pytest.mark.parametrize("preset", ["diloco", "streaming", "noloco"])
def test_a_call_comes_with_every_round_on_the_training_thread_and_with_the_model_of_that_round(tmp_path, preset):
    problem, told, agreed = Problem(0), list[decentral.RoundEnded](), list[torch.Tensor]()
    with alone(tmp_path, run_terms(preset), problem) as peer:

        @peer.on_round
        def note(ended: decentral.RoundEnded) -> None:
            told.append(ended)
            assert peer.round - ended.round in ((0, 1) if preset == "streaming" else (0,)), "the anchor is ahead by one"
            agreed.append(torch.cat([tensor.reshape(-1) for tensor in peer.agreed().values()]))

        while not peer.done:
            problem.step()
    assert [ended.round for ended in told] == list(range(1, 7))
    assert {(ended.rounds, ended.merged, ended.members) for ended in told} == {(6, 1, 1)}
    assert [ended.done for ended in told] == 5 * [False] + [True]
    if preset != "noloco":  # alone it has no partner
        assert all(ended.contributed for ended in told)
        assert preset == "streaming" or not any(torch.equal(one, other) for one, other in pairwise(agreed))
    assert torch.equal(agreed[-1], problem_in_agreed_order(peer))


def problem_in_agreed_order(peer: Peer) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in peer.agreed().values()])


def test_what_such_a_call_raises_is_raised_by_the_step(tmp_path: Path) -> None:
    problem = Problem(0)

    def fails(ended: decentral.RoundEnded) -> None:
        raise ZeroDivisionError(f"round {ended.round}")

    terms = run_terms("diloco")
    with alone(tmp_path, terms, problem) as peer:
        assert peer.on_round(fails) is fails
        for _ in range(5):
            problem.step()
        with pytest.raises(ZeroDivisionError, match="round 1"):
            problem.step()
