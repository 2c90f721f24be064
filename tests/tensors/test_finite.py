"""NaN and Inf are found wherever they are, in every dtype and layout; nothing else is taken for them."""

import pytest
import torch

from decentral.tensors.ops import is_finite

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_largest_the_smallest_and_nothing_are_finite(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    extremes = torch.tensor([info.max, info.min, info.smallest_normal, 0.0, -0.0], dtype=dtype)
    assert is_finite(extremes)
    assert is_finite(extremes[:0])
    assert is_finite(extremes.new_tensor(1.0))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_value_that_is_not_finite_is_found_at_any_place_of_any_layout(dtype: torch.dtype, bad: float) -> None:
    for place in (0, 7, 37, 69):
        tensor = torch.zeros(7, 10, dtype=dtype)
        tensor.view(-1)[place] = bad
        assert not is_finite(tensor)
        assert not is_finite(tensor.T)
    assert is_finite(tensor[:6])
