import pytest
import torch

from decentral.tensors.ops import is_rising

LIMIT = 10


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
@pytest.mark.parametrize(
    ("rows", "rises"),
    [
        ([[0, 1, 9], [3, 4, 5]], True),
        ([[0], [9]], True),
        ([[0, 1, 10], [3, 4, 5]], False),
        ([[3, 4, 5], [-1, 4, 5]], False),
        ([[3, 4, 5], [4, 4, 5]], False),
        ([[3, 4, 5], [3, 5, 4]], False),
        ([[10]], False),
        ([[-1]], False),
    ],
)
def test_rows_rise_strictly_within_bounds(rows: list[list[int]], rises: bool, dtype: torch.dtype):
    assert is_rising(torch.tensor(rows, dtype=dtype), LIMIT) is rises


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_nothing_rises(shape: tuple[int, int]):
    assert is_rising(torch.empty(shape, dtype=torch.int16), LIMIT)
