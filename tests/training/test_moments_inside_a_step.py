"""Loops that freeze, perturb, restore or step alone inside one step: what the model is at a boundary counts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.optim import optimizer as torch_optimizer

from decentral.errors import ConfigError
from tests.training.own_loops import INPUTS, ROUNDS, STEPS, backward, joined, pair_of, small, terms, train

Loop = Callable[[nn.Sequential, list[torch.optim.Optimizer]], None]  # one step of the loop


def a_gan_that_freezes_its_critic(model: nn.Sequential, optimizers: list[torch.optim.Optimizer]) -> None:
    generator, critic = model
    fake = generator(INPUTS)
    critic.requires_grad_(True)
    (critic(fake.detach()).mean() - critic(INPUTS).mean()).backward()
    optimizers[1].step()
    critic.requires_grad_(False)
    model.zero_grad()
    (-critic(fake).mean()).backward()
    optimizers[0].step()
    model.zero_grad()


def an_adversary_of_weights(model: nn.Sequential, optimizers: list[torch.optim.Optimizer]) -> None:
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    backward(model)
    for _ in range(7):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01 * parameter.grad.sign())
        model.zero_grad()
        backward(model)
    with torch.no_grad():
        for parameter, then in zip(model.parameters(), kept, strict=True):
            parameter.copy_(then)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def meta_learning_with_an_inner_optimizer(model: nn.Sequential, optimizers: list[torch.optim.Optimizer]) -> None:
    kept = copy.deepcopy(model.state_dict())
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        inner.zero_grad()
        backward(model)
        inner.step()
    model.load_state_dict(kept)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def layers_frozen_in_turn(model: nn.Sequential, optimizers: list[torch.optim.Optimizer]) -> None:
    for number in range(2):
        for place, layer in enumerate(model):
            layer.requires_grad_(place == number)
        backward(model)
        optimizers[number].step()
        optimizers[number].zero_grad()


@pytest.mark.parametrize(
    "step",
    [
        a_gan_that_freezes_its_critic,
        an_adversary_of_weights,
        meta_learning_with_an_inner_optimizer,
        layers_frozen_in_turn,
    ],
    ids=lambda step: step.__name__,
)
def test_it_trains_without_a_word(tmp_path, caplog, step: Loop):
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1))
    optimizers = pair_of(model)
    with joined(tmp_path, model, optimizers) as peer:
        while not peer.done:
            step(model, optimizers)
        assert (peer.round, peer.inner_steps) == (ROUNDS, ROUNDS * STEPS)
    assert [record.getMessage() for record in caplog.records if record.name == "decentral.training"] == []


def test_what_stays_frozen_for_a_round_is_told_once_and_is_shared_as_before(tmp_path, caplog):
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with joined(tmp_path, model, optimizer, terms(run={"rounds": 6})) as peer:
        while not peer.done:
            model[1].requires_grad_(peer.round < 1)
            backward(model)
            optimizer.step()
    words = [record.getMessage() for record in caplog.records if record.name == "decentral.training"]
    assert words == [
        "1.bias, and 1 more, took part in training at the join and stayed frozen for a round: their values are shared "
        "as before, so what other peers learn of them still comes in"
    ]


def test_what_is_thawed_and_trained_after_the_join_is_named_and_what_is_only_thawed_is_not(tmp_path):
    model = small()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with joined(tmp_path, model, optimizer) as peer:
        for _ in range(STEPS):
            model[0].requires_grad_(True)
            backward(model)
            model[0].zero_grad()
            optimizer.step()
        assert peer.round == 1
        with pytest.raises(ConfigError, match=r"^0\.weight was not trained when this peer joined and is now"):
            train(model, optimizer, STEPS)


# ---- parameters that are others than at the join ----


def resized(model: nn.Sequential) -> None:
    model[1].weight = nn.Parameter(torch.zeros(3, 6))
    model[1].bias = nn.Parameter(torch.zeros(3))


def replaced(model: nn.Sequential) -> None:
    model[1].weight = nn.Parameter(model[1].weight.detach().clone())


def resized_by_its_data(model: nn.Sequential) -> None:
    model[1].weight.data, model[1].bias.data = torch.zeros(3, 6), torch.zeros(3)
    model.zero_grad()


def taken_away(model: nn.Sequential) -> None:
    model[1] = nn.Identity()


def pruned(model: nn.Sequential) -> None:
    prune.l1_unstructured(model[1], "weight", 0.5)


def added(model: nn.Sequential) -> None:
    model.append(nn.Linear(2, 2))


CHANGES: list[tuple[Callable[[nn.Sequential], None], str]] = [
    (resized, r"1\.weight had shape \(2, 6\) at the join, and is another tensor of shape \(3, 6\)"),
    (replaced, r"1\.weight had shape \(2, 6\) at the join, and is another tensor of shape \(2, 6\)"),
    (resized_by_its_data, r"1\.weight had shape \(2, 6\) at the join, and is another tensor of shape \(3, 6\)"),
    (taken_away, r"1\.weight had shape \(2, 6\) at the join, and is gone"),
    (pruned, r"1\.weight had shape \(2, 6\) at the join, and is gone \(1\.weight_orig came\)"),
    (added, r"2\.weight, of shape \(2, 2\), came into the model after the join"),
]


@pytest.mark.parametrize("anew", [False, True], ids=["same optimizer", "another"])
@pytest.mark.parametrize(("change", "words"), CHANGES, ids=lambda one: getattr(one, "__name__", ""))
def test_it_is_named_with_both_shapes_at_the_next_boundary_or_where_none_comes(tmp_path, change: Any, words: str, anew):
    """There is none where the loop steps an optimizer of its own from there on, and nothing would be said."""

    def run() -> None:
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with joined(tmp_path, model, optimizer):
            change(model)
            train(model, torch.optim.SGD(model.parameters(), lr=0.01) if anew else optimizer, 16 if anew else STEPS)

    with pytest.raises(ConfigError, match=words):
        run()


def test_optimizers_of_other_models_are_no_matter_and_no_hook_stays(tmp_path):
    model, other = small(), small()
    optimizer, of_other = (torch.optim.SGD(one.parameters(), lr=0.01) for one in (model, other))
    with joined(tmp_path, model, optimizer) as peer:
        while not peer.done:
            for _ in range(40):
                backward(other)
                of_other.step()
            backward(model)
            optimizer.step()
        assert peer.round == ROUNDS
    before = len(torch_optimizer._global_optimizer_post_hooks)
    with joined(tmp_path / "again", model, optimizer):
        assert len(torch_optimizer._global_optimizer_post_hooks) == before + 1
    assert len(torch_optimizer._global_optimizer_post_hooks) == before
