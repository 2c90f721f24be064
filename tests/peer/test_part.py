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
from tests.kit.problems import joined, run_together, train
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
QUARTER, HALF = (Needs().in_files(SIZES, range(first, 4)) for first in (3, 2))


@pytest.fixture(autouse=True)
def without_files() -> Iterator[None]:
    """Memory of a process lies where its last peer wanted it."""
    yield
    offload_to(None)


def trained_by(trainee: Trainee) -> list[int]:
    """The fragments of which it makes gradients."""
    return [number for number, layer in enumerate(trainee.model.layers) if layer.weight.requires_grad]


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
        part = trained_by(both[1])
        assert len(part) == 2
        for number in set(range(4)) - set(part):
            held = both[1].model.layers[number].weight.flatten()
            assert torch.equal(held, replicas[0].anchors[number][: len(held)]), "what others learnt came in"
        named = both[1].model.named_parameters()
        assert all(one.grad is None for _, one in named if not one.requires_grad)
        contributed = [len(peer.status().members) for peer in peers]
        assert contributed == [2, 2]


def test_two_parts_make_up_a_whole(tmp_path: Path) -> None:
    """The second takes what the first leaves."""
    both = [Trainee(Stack(), number) for number in range(2)]
    with (
        joined(stages(), both[0], tmp_path / "0", memory=HALF) as first,
        joined(first.invite, both[1], tmp_path / "1", memory=HALF) as second,
    ):
        assert sorted(trained_by(both[0]) + trained_by(both[1])) == [0, 1, 2, 3]
        run_together(partial(train, first, both[0]), partial(train, second, both[1]))
        assert first.anchor_digest == second.anchor_digest


def test_a_part_is_the_same_after_a_restart(tmp_path: Path) -> None:
    founder = Trainee(Stack(), 0)
    with joined(stages(rounds=1000), founder, tmp_path, memory=HALF) as peer:
        train(peer, founder, 1)
        before = trained_by(founder)
    again = Trainee(Stack(), 0)
    with joined(stages(rounds=1000), again, tmp_path, memory=HALF):
        assert trained_by(again) == before


@pytest.mark.parametrize("before", [None, HALF], ids=["all", "half"])
@pytest.mark.parametrize("after", [QUARTER, None], ids=["quarter", "all"])
def test_a_restart_may_train_another_part(before: int | None, after: int | None, tmp_path: Path) -> None:
    founder = Trainee(Stack(), 0)
    founder.optimizer = torch.optim.AdamW(founder.model.parameters(), lr=0.003)
    with joined(stages(rounds=1000), founder, tmp_path, memory=before) as peer:
        train(peer, founder, 5)
    again = Trainee(Stack(), 0)
    again.optimizer = torch.optim.AdamW(again.model.parameters(), lr=0.003)
    with joined(stages(rounds=1000), again, tmp_path, memory=after) as peer:
        assert len(trained_by(again)) == (4 if after is None else 1)
        rest = [one for one in again.model.parameters() if not one.requires_grad]
        assert not any(one in again.optimizer.state for one in rest), "no moments of what is not trained"
        anchors = peer._up.swarm.node.replica.anchors
        for number in set(range(4)) - set(trained_by(again)):
            assert again.model.layers[number].weight.data_ptr() == anchors[number].data_ptr()
        train(peer, again, 9)


def test_a_model_is_whole_again_after_the_block(tmp_path: Path) -> None:
    founder = Trainee(Stack(), 0)
    with joined(stages(rounds=1000), founder, tmp_path / "0", memory=HALF) as peer:
        train(peer, founder, 1)
        anchors = [anchor_N.untyped_storage().data_ptr() for anchor_N in peer._up.swarm.node.replica.anchors]
    assert trained_by(founder) == [0, 1, 2, 3]
    assert not any(one.untyped_storage().data_ptr() in anchors for one in founder.model.parameters())
    with joined(stages(rounds=1000).changed(run={"salt": "again"}), founder, tmp_path / "1") as peer:
        train(peer, founder, 1)


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
        for number, layer in enumerate(model.layers):
            is_its = layer.weight.untyped_storage().data_ptr() == begins[number]
            assert is_its == (number not in trained_by(both[1]))


def test_an_optimizer_that_moves_what_has_no_gradient_is_found_out(tmp_path: Path) -> None:
    def train_and_change() -> None:
        founder = Trainee(Stack(), 0)
        with joined(stages(rounds=1000), founder, tmp_path, memory=HALF) as peer:
            train(peer, founder, 1)
            (number, *_) = set(range(4)) - set(trained_by(founder))
            with torch.no_grad():
                founder.model.layers[number].weight.mul_(0.9)
            train(peer, founder, 9)

    with pytest.raises(ConfigError, match="is not trained here, for want of memory"):
        train_and_change()
    with joined(stages(rounds=1000), Trainee(Stack(), 0), tmp_path, memory=HALF) as peer:
        assert peer.round <= 1, "no checkpoint of a changed anchor"
