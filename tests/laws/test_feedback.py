"""What every feedback mechanism promises: pure, repeatable, spelled, and nothing lost that its equation keeps."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from decentral.compressors import Compressor, Feedback, TopK, Uncompressed, parse_compressor, parse_feedback
from decentral.compressors.base import add_flat
from decentral.errors import ConfigError, NonFiniteError

MECHANISMS = [
    "none",
    "ef(beta=1)",
    "ef(beta=0.95)",
    "ef21",
    "econtrol(eta=0.0)",
    "econtrol(eta=0.25)",
    "dgc(momentum=0.5)",
]
SHAPES = ((67, 31), (13,), (), (0, 4), (2, 3, 50))
NUMEL = 67 * 31 + 13 + 1 + 300
SPARSE: Compressor = parse_compressor("topk(k=64, chunk=4096)")
LOSSY: Compressor = parse_compressor("topk(k=64, chunk=4096) >> signmag2")

each_compressor = pytest.mark.parametrize("compressor", [SPARSE, LOSSY, parse_compressor("int8(block=64)")], ids=str)


@pytest.fixture(params=MECHANISMS)
def feedback(request: pytest.FixtureRequest) -> Feedback:
    return parse_feedback(request.param)


def decoded(compressor: Compressor, payloads, like_N: Tensor) -> Tensor:
    total_N = torch.zeros_like(like_N)
    add_flat(compressor, total_N, payloads)
    return total_N


def rounds(feedback: Feedback, compressor: Compressor, gradients: list[Tensor]) -> list[tuple[Tensor, Tensor, dict]]:
    """(what was decoded, the estimate, the sender's state) of a sole peer's rounds."""
    sender, receiver, found = {}, {}, []
    for gradient_N in gradients:
        sending = feedback.send(compressor, gradient_N, sender, SHAPES)
        arrived_N = decoded(compressor, sending.payloads, gradient_N)
        receiving = feedback.receive(arrived_N, receiver)
        sender, receiver = sending.state, receiving.state
        found.append((arrived_N, receiving.estimate_N, sender))
    return found


@each_compressor
def test_state_has_the_names_and_the_size_that_are_declared(feedback: Feedback, compressor: Compressor, gaussian):
    sending = feedback.send(compressor, gaussian(NUMEL), {}, SHAPES)
    receiving = feedback.receive(gaussian(NUMEL), {})
    assert tuple(sending.state) == feedback.sender
    assert tuple(receiving.state) == feedback.receiver
    for tensor in (receiving.estimate_N, *sending.state.values(), *receiving.state.values()):
        assert (tensor.shape, tensor.dtype) == ((NUMEL,), torch.float32)
    assert [payload.shape for payload in sending.payloads] == list(SHAPES)


@each_compressor
def test_nothing_given_is_changed_and_nothing_returned_is_shared(feedback: Feedback, compressor: Compressor, gaussian):
    state = {name: gaussian(NUMEL, seed) for seed, name in enumerate(feedback.sender)}
    held = {name: gaussian(NUMEL, seed) for seed, name in enumerate(feedback.receiver)}
    gradient_N = gaussian(NUMEL, 9)
    sending = feedback.send(compressor, gradient_N, state, SHAPES)
    for tensor in sending.state.values():
        tensor.fill_(7.0)
    receiving = feedback.receive(gradient_N, held)
    kept = [tensor.clone() for tensor in receiving.state.values()]
    if feedback.receiver:  # without state, what arrived may itself come back
        receiving.estimate_N.fill_(7.0)
    assert all(torch.equal(a, b) for a, b in zip(kept, receiving.state.values(), strict=True))
    assert torch.equal(gradient_N, gaussian(NUMEL, 9))
    for given in (state, held):
        assert all(torch.equal(tensor, gaussian(NUMEL, seed)) for seed, tensor in enumerate(given.values()))


@each_compressor
def test_an_aborted_round_can_be_repeated_bit_for_bit(feedback: Feedback, compressor: Compressor, gaussian):
    state = {name: gaussian(NUMEL, seed) for seed, name in enumerate(feedback.sender)}
    first, second = (feedback.send(compressor, gaussian(NUMEL, 9), state, SHAPES) for _ in range(2))
    for a, b in zip(first.payloads, second.payloads, strict=True):
        assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a.parts, b.parts, strict=True))
    assert all(torch.equal(first.state[name], second.state[name]) for name in feedback.sender)


def test_no_state_means_zeros(feedback: Feedback, gaussian):
    zeros = {name: torch.zeros_like(gaussian(NUMEL)) for name in (*feedback.sender, *feedback.receiver)}
    (fresh, zeroed) = (feedback.send(SPARSE, gaussian(NUMEL), state, SHAPES) for state in ({}, zeros))
    assert all(torch.equal(fresh.state[name], zeroed.state[name]) for name in feedback.sender)
    first, second = (feedback.receive(gaussian(NUMEL), state) for state in ({}, zeros))
    assert torch.equal(first.estimate_N, second.estimate_N)


def test_without_loss_the_estimate_is_the_gradient(feedback: Feedback, integers: Callable[..., Tensor]):
    """econtrol with e = 0 and C = identity has h = g, too."""
    gradients = [integers((NUMEL,), seed) for seed in range(5)]
    for gradient_N, (_, estimate_N, _) in zip(gradients, rounds(feedback, Uncompressed(), gradients), strict=True):
        assert torch.equal(estimate_N, gradient_N)


def whole_rounds(spelling: str, integers: Callable[..., Tensor]) -> tuple[Tensor, list[tuple[Tensor, Tensor, dict]]]:
    """Whole numbers and quarters: nothing is rounded, so every sum is exact."""
    gradients = [integers((NUMEL,), seed) for seed in range(4)]
    return sum(gradients), rounds(parse_feedback(spelling), SPARSE, gradients)


def test_what_is_owed_and_what_arrived_add_up_to_what_was_given(integers: Callable[..., Tensor]):
    given_N, found = whole_rounds("ef(beta=1)", integers)
    assert torch.equal(sum(arrived for arrived, _, _ in found) + found[-1][2]["debt"], given_N)


@pytest.mark.parametrize("spelling", [one for one in MECHANISMS if "sent" in parse_feedback(one).sender])
def test_receivers_hold_what_the_sender_thinks_they_hold(spelling: str, integers: Callable[..., Tensor]):
    _, found = whole_rounds(spelling, integers)
    arrived_N = sum(arrived for arrived, _, _ in found)
    assert torch.equal(found[-1][2]["sent"], arrived_N)
    assert torch.equal(found[-1][1], arrived_N)


@pytest.mark.parametrize("spelling", [one for one in MECHANISMS if one.startswith("econtrol")])
def test_econtrol_owes_what_was_given_less_its_estimates(spelling: str, integers: Callable[..., Tensor]):
    """e_T = sum of (g_t - h_{t+1})."""
    given_N, found = whole_rounds(spelling, integers)
    assert torch.equal(found[-1][2]["debt"], given_N - sum(estimate for _, estimate, _ in found))


@each_compressor
def test_sender_and_receivers_hold_the_same_bits_after_many_rounds_of_which_some_are_lost(
    feedback: Feedback, compressor: Compressor
):
    """Three senders, of whom one or another is away; a round that no commit names changes neither side."""
    random = torch.Generator().manual_seed(1)
    senders, receivers = ([{} for _ in range(3)] for _ in range(2))
    for _ in range(40):
        for peer in range(3):
            if torch.rand((), generator=random) < 0.2:
                continue
            gradient_N = torch.randn(NUMEL, generator=random)
            sending = feedback.send(compressor, gradient_N, senders[peer], SHAPES)
            receiving = feedback.receive(decoded(compressor, sending.payloads, gradient_N), receivers[peer])
            if torch.rand((), generator=random) < 0.2:
                continue
            senders[peer], receivers[peer] = sending.state, receiving.state
    for sender, receiver in zip(senders, receivers, strict=True):
        assert set(feedback.receiver) <= set(feedback.sender)
        for name in feedback.receiver:
            assert torch.equal(sender[name].view(torch.int32), receiver[name].view(torch.int32))


@pytest.mark.parametrize("compressor", [SPARSE, LOSSY], ids=str)
@pytest.mark.parametrize("spelling", ["ef(beta=1)", "ef21", "econtrol(eta=0.001)", "dgc(momentum=0.5)"])
def test_a_constant_gradient_arrives_in_time(spelling: str, compressor: Compressor, gaussian):
    """On average over rounds, whatever the compressor drops at first; alone, 0.9 of the norm is lost for ever."""
    gradient_N = gaussian(NUMEL)
    estimates = [estimate for _, estimate, _ in rounds(parse_feedback(spelling), compressor, [gradient_N] * 160)]
    late_N = torch.stack(estimates[60:]).mean(0)
    share = float(late_N @ gradient_N / gradient_N.square().sum())
    assert float((late_N / share - gradient_N).norm()) < 0.35 * float(gradient_N.norm())
    assert 0.5 < share < 2.1  # dgc's momentum of 0.5 doubles what waits


def test_state_of_another_fragment_is_refused(feedback: Feedback, gaussian):
    for name in feedback.sender:
        with pytest.raises(ConfigError, match=rf"{name} \(3,\) and gradient \({NUMEL},\) differ in shape"):
            feedback.send(SPARSE, gaussian(NUMEL), {name: torch.zeros(3)}, SHAPES)
    for name in feedback.receiver:
        with pytest.raises(ConfigError, match="differ in shape"):
            feedback.receive(gaussian(NUMEL), {name: torch.zeros(3)})


def test_nan_is_refused_before_any_state_is_made(feedback: Feedback, gaussian):
    gradient_N = gaussian(NUMEL)
    gradient_N[5] = torch.nan
    with pytest.raises(NonFiniteError):
        feedback.send(SPARSE, gradient_N, {}, SHAPES)


def test_the_spelling_makes_an_equal_mechanism(feedback: Feedback):
    assert parse_feedback(str(feedback)) == feedback
    assert isinstance(feedback, Feedback)


def test_a_gradient_that_requires_gradients_leaves_no_graph(feedback: Feedback, gaussian):
    sending = feedback.send(TopK(), gaussian(NUMEL).requires_grad_(), {}, SHAPES)
    assert not any(tensor.requires_grad for tensor in sending.state.values())
