"""A peer whose memory holds a part of what a run trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from decentral.errors import ConfigError
from decentral.manifest import Manifest
from decentral.peer.peer import Peer
from decentral.tensors.memory import offload_to
from decentral.training.part import Needs
from tests.kit.problems import Swarm, joined, run_together, train
from tests.kit.trainees import Trainee, terms


class Stack(nn.Module):
    """Four blocks that go one after the other."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = inputs + torch.tanh(layer(inputs))
        return self.head(inputs)


SIZES = [42, 42, 42, 49]
HALF = Needs().in_files(SIZES, range(2, 4))


@pytest.fixture(autouse=True)
def without_files() -> Iterator[None]:
    """Memory of a process lies where its last peer wanted it."""
    yield
    offload_to(None)


def stages(preset: str = "sparseloco", rounds: int = 8) -> Manifest:
    return terms(preset, outer={"fragments": 4, "layout": "stages"}, run={"rounds": rounds})


@contextmanager
def whole_and_part(preset: str, folder: Path, rounds: int = 8) -> Iterator[tuple[list[Trainee], list[Peer]]]:
    both = [Trainee(Stack(), number) for number in range(2)]
    with ExitStack() as stack:
        first = stack.enter_context(joined(stages(preset, rounds), both[0], folder / "0"))
        second = stack.enter_context(joined(first.invite, both[1], folder / "1", memory=HALF))
        yield both, [first, second]


@pytest.mark.parametrize("preset", ["sparseloco", "diloco"])
def test_a_peer_with_little_memory_trains_a_part_and_has_what_all_learnt(preset: str, tmp_path: Path) -> None:
    with whole_and_part(preset, tmp_path) as (both, peers):
        before = [anchor_N.clone() for anchor_N in peers[0]._up.swarm.node.replica.anchors]
        run_together(*(partial(train, peer, one) for peer, one in zip(peers, both, strict=True)))
        replicas = [peer._up.swarm.node.replica for peer in peers]
        assert replicas[0].digest == replicas[1].digest
        assert not any(torch.equal(*two) for two in zip(before, replicas[0].anchors, strict=True)), "all was learnt"
        for number in range(2):
            held = both[1].model.layers[number].weight.flatten()
            assert torch.equal(held, replicas[0].anchors[number][: len(held)]), "what others learnt came in"
        trained = {name for name, one in both[1].model.named_parameters() if one.requires_grad}
        assert trained == {f"{name}.{of}" for name in ("layers.2", "layers.3", "head") for of in ("weight", "bias")}
        gradients = {name for name, one in both[1].model.named_parameters() if one.grad is not None}
        assert gradients <= trained


def test_two_parts_make_up_a_whole(tmp_path: Path) -> None:
    """The second takes what the first leaves."""
    swarm = Swarm(stages(), tmp_path, *(Trainee(Stack(), number) for number in range(2)), memory=HALF)
    swarm.ends_alike()
    parts = [[one.requires_grad for one in trainee.model.parameters()] for trainee in swarm.problems]
    assert [sum(both) for both in zip(*parts, strict=True)] == [1] * len(parts[0])


def test_a_part_is_the_same_after_a_restart(tmp_path: Path) -> None:
    founder = Trainee(Stack(), 0)
    with joined(stages(rounds=1000), founder, tmp_path, memory=HALF) as peer:
        train(peer, founder, 1)
    again = Trainee(Stack(), 0)
    with joined(stages(rounds=1000), again, tmp_path, memory=HALF):
        assert [one.requires_grad for one in again.model.parameters()] == [False] * 4 + [True] * 6


def test_memory_that_is_enough_changes_nothing(tmp_path: Path) -> None:
    alone = Trainee(Stack(), 0)
    with joined(stages(), alone, tmp_path, memory="64GB") as peer:
        train(peer, alone, 2)
    assert all(parameter.requires_grad for parameter in alone.model.parameters())


def test_a_method_of_pairs_needs_all_of_the_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"join\(memory=...\): outer.method noloco needs peers that train all"):
        joined(stages("noloco"), Trainee(Stack(), 0), tmp_path, memory=HALF).__enter__()


def test_too_little_memory_says_how_much_it_takes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="for one of its 4 fragments"):
        joined(stages(), Trainee(Stack(), 0), tmp_path, memory="100MB").__enter__()


def test_what_is_not_trained_here_is_the_anchors_own_memory(tmp_path: Path) -> None:
    with whole_and_part("sparseloco", tmp_path, rounds=1000) as (both, peers):
        anchors = peers[1]._up.swarm.node.replica.anchors
        begins = [anchor_N.untyped_storage().data_ptr() for anchor_N in anchors]
        model = both[1].model
        assert [layer.weight.untyped_storage().data_ptr() for layer in model.layers[:2]] == begins[:2]
        assert model.layers[3].weight.untyped_storage().data_ptr() not in begins


def test_an_optimizer_that_moves_what_has_no_gradient_is_found_out(tmp_path: Path) -> None:
    founder = Trainee(Stack(), 0)
    with joined(stages(rounds=1000), founder, tmp_path, memory=HALF) as peer:
        train(peer, founder, 1)
        with torch.no_grad():
            founder.model.layers[0].weight.mul_(0.9)
        with pytest.raises(ConfigError, match=r"layers\.0\.weight is not trained here, for want of memory"):
            train(peer, founder, 5)
