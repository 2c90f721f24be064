"""tests/optimizers/test_steps.py"""

import pytest
import torch

from decentral.errors import ConfigError
from decentral.optimizers import blend, carry


def gaussian(seed: int) -> torch.Tensor:
    return torch.randn(1001, generator=torch.Generator().manual_seed(seed))


def merge(live: torch.Tensor, contributed: torch.Tensor, anchor: torch.Tensor, alpha: float | None) -> torch.Tensor:
    return carry(live, contributed, anchor) if alpha is None else blend(live, anchor, alpha)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.view(torch.int32).tolist()


@pytest.mark.parametrize("alpha", [None, 0.0])
def test_with_no_step_since_the_contribution_live_becomes_the_anchor_bit_for_bit(alpha):
    anchor = gaussian(0)
    anchor[:3] = torch.tensor([-0.0, 2.0**-149, 1e38])
    assert bits(merge(gaussian(1), gaussian(1), anchor, alpha)) == bits(anchor)


def test_carrying_keeps_the_inner_steps_made_since():
    live, contributed, anchor = torch.tensor([5.0, 2.0]), torch.tensor([4.0, 2.0]), torch.tensor([10.0, 20.0])
    assert merge(live, contributed, anchor, None).tolist() == [11.0, 20.0]


def test_alpha_weighs_the_live_copy():
    live, anchor = torch.tensor([4.0]), torch.tensor([8.0])
    assert merge(live, live, anchor, 0.25).tolist() == [7.0]


def test_alpha_1_never_listens():
    assert torch.equal(merge(gaussian(0), gaussian(1), gaussian(2), 1.0), gaussian(0))


@pytest.mark.parametrize("alpha", [None, 0.0, 0.5, 1.0])
def test_the_result_is_new_and_the_arguments_are_untouched(alpha):
    arguments = gaussian(0), gaussian(1), gaussian(2)
    merge(*arguments, alpha).fill_(7.0)
    assert all(torch.equal(tensor, gaussian(seed)) for seed, tensor in enumerate(arguments))


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_an_alpha_outside_0_to_1_is_refused(alpha):
    with pytest.raises(ConfigError, match=r"in \[0, 1\]"):
        merge(gaussian(0), gaussian(0), gaussian(0), alpha)
