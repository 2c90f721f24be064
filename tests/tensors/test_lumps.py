"""Work is cut into runs of neighbours that are worth a thread."""

import pytest

from decentral.tensors.threads import lumps

SIZES = [[], [5], [100], [1, 2, 3], [1, 100, 1], [50, 50, 50], [100, 100], [99, 1, 1, 300, 0, 0]]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_runs_are_all_places_in_order(sizes: list[int]):
    found = [i for lump in lumps(sizes, 100) for i in range(len(sizes))[lump]]
    assert found == list(range(len(sizes)))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_run_has_enough_or_is_followed_by_a_large_one_or_by_none(sizes: list[int]):
    runs = [sizes[lump] for lump in lumps(sizes, 100)]
    for run, following in zip(runs, [*runs, None][1:], strict=True):
        assert sum(run) >= 100 or following is None or following[0] >= 100


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_large_one_is_alone(sizes: list[int]):
    for lump in lumps(sizes, 100):
        assert len(sizes[lump]) == 1 or max(sizes[lump]) < 100
