"""What every outer optimizer promises: the same bits everywhere, nothing given is changed, and state that travels."""

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from decentral.errors import ConfigError
from decentral.optimizers import OuterMethod, make_outer, mean_pseudo_gradient
from tests.kit.stepping import step, swap

NUMEL = 1001
State = dict[str, Tensor]
PEERS = [bytes([first]) + bytes(31) for first in (9, 200, 3, 77)]


@pytest.fixture
def device() -> str:
    """Replicas live on the processor."""
    return "cpu"


def move(outer: OuterMethod, anchor: Tensor, gradient: Tensor, state: State) -> tuple[Tensor, State]:
    """One step; of a method for pairs, with a partner that has the same slow parameters."""
    if outer.topology == "pair":
        change = outer.contribute(gradient, torch.zeros_like(gradient))
        return swap(outer, [anchor] * 2, [change] * 2, [state] * 2)[0]
    return step(outer, anchor, gradient, state, peers=4)


def walked(outer: OuterMethod, gaussian: Callable[..., Tensor], rounds: int = 3) -> tuple[Tensor, State]:
    """An anchor and a state that are no longer those of the beginning."""
    anchor = gaussian(NUMEL)
    state = outer.init(anchor)
    for seed in range(1, 1 + rounds):
        anchor, state = move(outer, anchor, gaussian(NUMEL, seed), state)
    return anchor, state


def same(first: State, second: State) -> bool:
    return list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)


def test_the_same_rounds_give_the_same_bits_twice(outer: OuterMethod, gaussian):
    (first, state), (second, again) = (walked(outer, gaussian) for _ in range(2))
    assert torch.equal(first, second)
    assert same(state, again)


def test_the_order_in_which_contributions_came_changes_no_bit(outer: OuterMethod, gaussian):
    sent = [(peer, gaussian(NUMEL, seed), 1.0 + seed) for seed, peer in enumerate(PEERS)]
    anchor, state = walked(outer, gaussian)
    steps = [move(outer, anchor, mean_pseudo_gradient(order), state) for order in itertools.permutations(sent)]
    assert all(torch.equal(after, steps[0][0]) and same(kept, steps[0][1]) for after, kept in steps)


def test_nothing_given_is_changed_and_nothing_returned_is_shared(outer: OuterMethod, gaussian):
    anchor, state = walked(outer, gaussian)
    gradient = gaussian(NUMEL, 9)
    given = [anchor, gradient, *state.values()]
    before = [tensor.clone() for tensor in given]
    after, kept = move(outer, anchor, gradient, state)
    for tensor in (after, *kept.values()):
        tensor.fill_(7.0)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(given, before, strict=True))


def test_the_state_of_the_beginning_does_not_follow_the_anchor(outer: OuterMethod, gaussian):
    anchor = gaussian(NUMEL)
    state, wanted = outer.init(anchor), outer.init(anchor.clone())
    anchor.fill_(7.0)
    assert same(state, wanted)
    assert all(torch.isfinite(tensor).all() for tensor in state.values())


def test_a_state_that_was_saved_and_loaded_goes_on_as_before(outer: OuterMethod, gaussian):
    """As a joiner takes it from a snapshot, or a peer from its checkpoint."""
    anchor, state = walked(outer, gaussian)
    loaded = load(save(state))
    assert set(loaded) == set(state)
    after, kept = move(outer, anchor, gaussian(NUMEL, 9), state)
    resumed, kept_too = move(
        outer, anchor, gaussian(NUMEL, 9), {name: t.to(anchor.device) for name, t in loaded.items()}
    )
    assert torch.equal(resumed, after)
    assert same(kept, {name: kept_too[name] for name in kept})


def test_the_state_stays_flat_float32_with_the_names_and_shapes_of_the_beginning(outer: OuterMethod, gaussian):
    anchor, state = walked(outer, gaussian)
    begun = outer.init(anchor)
    assert (anchor.dtype, anchor.shape, bool(torch.isfinite(anchor).all())) == (torch.float32, (NUMEL,), True)
    form = {name: (tensor.dtype, tensor.shape, tensor.device) for name, tensor in begun.items()}
    assert {name: (tensor.dtype, tensor.shape, tensor.device) for name, tensor in state.items()} == form
    assert all(
        (tensor.dtype, tensor.dim(), tensor.device) == (torch.float32, 1, anchor.device) for tensor in state.values()
    )
    assert all(torch.isfinite(tensor).all() for tensor in state.values())


def test_without_momentum_a_pseudo_gradient_of_zero_moves_nothing(outer: OuterMethod, gaussian):
    anchor = gaussian(NUMEL)
    after, _ = move(outer, anchor, torch.zeros_like(anchor), outer.init(anchor))
    assert torch.equal(after, anchor)


def test_a_pseudo_gradient_is_subtracted(outer: OuterMethod, gaussian):
    """The sign of anchor - local: a method with the other sign climbs. Twice, for those that apply it a round late."""
    anchor, gradient = gaussian(NUMEL), gaussian(NUMEL, 1)
    between, state = move(outer, anchor, gradient, outer.init(anchor))
    after, _ = move(outer, between, gradient, state)
    assert float((anchor - after).double() @ gradient.double()) > 0


def test_no_graph_is_kept_of_parameters_that_require_gradients(outer: OuterMethod, gaussian):
    anchor, gradient = (gaussian(NUMEL, seed).requires_grad_() for seed in range(2))
    after, state = move(outer, anchor, gradient, outer.init(anchor))
    assert not any(tensor.requires_grad for tensor in (after, *state.values()))


def test_equal_fields_make_an_equal_method_and_a_number_too_many_is_refused(outer: OuterMethod):
    assert make_outer(outer.name, dataclasses.asdict(outer)) == outer
    with pytest.raises(ConfigError, match="has no warmth"):
        make_outer(outer.name, {"warmth": 1.0})
