"""A small dose of ``make friends``: who lies to nobody loses nothing by dying, sleeping, leaving or meeting again."""

from __future__ import annotations

import pytest

from tests.simulate.friends import STORIES, problems_of

AT_ONCE = ("any order", "one death after the other", "a founder that dies at first")


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        pytest.param(name, seed, marks=[] if name in AT_ONCE and seed == 1 else [pytest.mark.long])
        for name in STORIES
        for seed in (1, 2)
    ],
)
def test_friends_lose_nothing_by_what_befalls_them(name, seed):
    assert problems_of((name, seed))[2] == [], f"python -m tests.simulate.friends --only {name!r} --seeds {seed}"
