"""DiLoCo's and Streaming DiLoCo's outer step against torch's own SGD and the closed form."""

import pytest
import torch

from decentral.errors import ConfigError
from decentral.optimizers import OuterMethod
from decentral.optimizers.diloco import DiLoCo, outer_learning_rate
from decentral.optimizers.sparseloco import SparseLoCo
from decentral.optimizers.streaming import StreamingDiLoCo
from tests.kit.stepping import step


def gaussian(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(101, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(outer: OuterMethod, anchor: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    state = outer.init(anchor)
    for gradient in gradients:
        anchor, state = step(outer, anchor, gradient, state)
    return anchor


def torch_sgd(anchor: torch.Tensor, gradients: list[torch.Tensor], **hyper: object) -> torch.Tensor:
    parameter = torch.nn.Parameter(anchor.clone())
    sgd = torch.optim.SGD([parameter], **hyper)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        sgd.step()
    return parameter.detach()


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (0.4, 0.9), (1.0, 0.5)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
@pytest.mark.parametrize("method", [DiLoCo, StreamingDiLoCo])
def test_it_is_torchs_nesterov_sgd(method, dtype, tolerance, lr, momentum):
    """Not bit for bit: torch's add(alpha=) may fuse the product and the sum, and ours must be equal everywhere."""
    anchor, gradients = gaussian(0, dtype), [gaussian(seed, dtype) for seed in range(1, 13)]
    ours = run(method(lr=lr, momentum=momentum), anchor, gradients)
    theirs = torch_sgd(anchor, gradients, lr=lr, momentum=momentum, nesterov=True)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=10 * tolerance)


def test_powers_of_two_leave_no_rounding_so_torch_agrees_bit_for_bit():
    anchor = torch.randint(-64, 64, (101,), generator=torch.Generator().manual_seed(0)).float()
    gradients = [torch.randint(-8, 8, (101,), generator=torch.Generator().manual_seed(s)).float() for s in range(6)]
    ours = run(DiLoCo(lr=0.5, momentum=0.5), anchor, gradients)
    assert torch.equal(ours, torch_sgd(anchor, gradients, lr=0.5, momentum=0.5, nesterov=True))


def test_the_first_step_moves_1_33_times_the_pseudo_gradient():
    anchor, gradient = gaussian(0, torch.float64), gaussian(1, torch.float64)
    moved = anchor - run(DiLoCo(lr=0.7, momentum=0.9), anchor, [gradient])
    torch.testing.assert_close(moved, 1.33 * gradient, rtol=1e-12, atol=1e-12)


def test_a_constant_pseudo_gradient_ends_at_7_times_itself_per_step():
    gradient = gaussian(1, torch.float64)
    before = run(DiLoCo(lr=0.7, momentum=0.9), torch.zeros_like(gradient), [gradient] * 400)
    after = run(DiLoCo(lr=0.7, momentum=0.9), torch.zeros_like(gradient), [gradient] * 401)
    torch.testing.assert_close(before - after, 7 * gradient, rtol=1e-9, atol=1e-9)


def test_n_constant_steps_follow_the_closed_form():
    gradient, lr, mu = gaussian(1, torch.float64), 0.7, 0.9
    moved = -run(DiLoCo(lr=lr, momentum=mu), torch.zeros_like(gradient), [gradient] * 9)
    gain = sum(lr * (1 + mu * (1 - mu**n) / (1 - mu)) for n in range(1, 10))
    torch.testing.assert_close(moved, gain * gradient, rtol=1e-12, atol=1e-12)


def test_sparseloco_is_plain_sgd():
    anchor, gradients = gaussian(0), [gaussian(seed) for seed in range(1, 5)]
    torch.testing.assert_close(run(SparseLoCo(lr=0.65), anchor, gradients), torch_sgd(anchor, gradients, lr=0.65))


@pytest.mark.parametrize("outer", [DiLoCo(), StreamingDiLoCo(), SparseLoCo()])
def test_a_step_changes_none_of_its_arguments_and_returns_new_tensors(outer):
    anchor, gradient = gaussian(0), gaussian(1)
    _, state = step(outer, anchor, gradient, outer.init(anchor))
    kept = {name: value.clone() for name, value in state.items()}
    after, new_state = step(outer, anchor, gradient, state)
    for tensor in (after, *new_state.values()):
        tensor.fill_(7.0)
    assert torch.equal(anchor, gaussian(0))
    assert torch.equal(gradient, gaussian(1))
    assert all(torch.equal(state[name], kept[name]) for name in kept)


@pytest.mark.parametrize("outer", [DiLoCo(), StreamingDiLoCo(), SparseLoCo()])
def test_the_same_step_twice_gives_the_same_bits(outer):
    first, second = (run(outer, gaussian(0), [gaussian(1), gaussian(2)]) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("method", [DiLoCo, StreamingDiLoCo, SparseLoCo])
@pytest.mark.parametrize("lr", [0.0, -0.1, float("nan"), float("inf")])
def test_a_learning_rate_that_cannot_be_meant_is_refused(method, lr):
    with pytest.raises(ConfigError, match="lr must be above 0 and finite"):
        method(lr=lr)


@pytest.mark.parametrize("momentum", [-0.1, 1.0, 2.0, float("nan")])
def test_a_momentum_that_cannot_be_meant_is_refused(momentum):
    with pytest.raises(ConfigError, match=r"momentum must be in \[0, 1\)"):
        DiLoCo(momentum=momentum)


def test_the_learning_rate_follows_the_number_of_peers():
    assert [outer_learning_rate(peers) for peers in (1, 2, 4, 8, 100)] == [0.4, 0.6, 0.6, 0.8, 0.8]
    with pytest.raises(ConfigError, match="at least 1 peer"):
        outer_learning_rate(0)
