"""Who owns how much of a reduce: all are done at the same time, and nobody could be done earlier."""

from __future__ import annotations

import random

import pytest

from decentral.dissemination.spread import Line, even_out, spread
from decentral.rounds.reduce import MOST_PARTS, MOST_PIECES, Grain, partition, shares


def finish(uplinks, owned):
    """When the last peer has sent its slices and its result, for a body of one."""
    others = len(uplinks) - 1
    return max((1 - s + s * others) / u for u, s in zip(uplinks, owned, strict=True))


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_equal_links_own_equal_parts(count):
    assert shares([5.0] * count) == pytest.approx([1 / count] * count)


def test_who_can_hardly_send_its_slices_owns_nothing():
    owned = shares([10.0] * 7 + [1.0])
    assert owned[-1] == 0.0
    assert finish([10.0] * 7 + [1.0], owned) == 1.0, "its own slices: nothing can be done about that"


def test_who_can_send_nothing_owns_nothing_and_somebody_always_does():
    assert shares([0.0, 3.0, 3.0]) == pytest.approx([0.0, 0.5, 0.5])
    assert shares([0.0, 3.0]) == [0.0, 1.0]
    assert shares([0.0, 0.0]) == [0.5, 0.5]


def test_no_other_division_is_done_earlier():
    for seed in range(50):
        draw = random.Random(seed)
        uplinks = [draw.lognormvariate(3, 1) for _ in range(draw.randrange(2, 10))]
        owned = shares(uplinks)
        assert sum(owned) == pytest.approx(1.0)
        assert min(owned) >= 0.0
        best = finish(uplinks, owned)
        for _ in range(200):
            other = [draw.expovariate(1) for _ in uplinks]
            assert finish(uplinks, [o / sum(other) for o in other]) >= best - 1e-9


def test_ranges_cover_everything_though_some_own_nothing():
    owners = tuple(bytes([n]) * 32 for n in range(4))
    ranges = partition(100_000, owners, shares([1.0, 50.0, 50.0, 0.0]))
    assert [owner for owner, _, _ in ranges] == [owners[1], owners[2]]
    (_, start, cut), (_, goes_on, stop) = ranges
    assert (start, cut, stop) == (0, goes_on, 100_000)
    assert abs(cut - 50_000) < 4096


OWNERS = tuple(n.to_bytes(32, "big") for n in range(1000))


@pytest.mark.parametrize("num_owners", [1, 3, 8, 100, 1000])
@pytest.mark.parametrize("numel", [1, 4097, 96 * 4096, 1 << 22, 10**9])
def test_pieces_cover_every_element_once_and_are_neither_small_nor_many(numel, num_owners):
    ranges = partition(numel, OWNERS[:num_owners])
    assert [start for _, start, _ in ranges] == [0, *(stop for _, _, stop in ranges[:-1])]
    assert ranges[-1][2] == numel
    assert [owner for owner, _, _ in ranges] == sorted(owner for owner, _, _ in ranges)
    assert all(stop - start > 0 and start % 4096 == 0 for _, start, stop in ranges)
    owners = {owner for owner, _, _ in ranges}
    assert len(ranges) <= max(len(owners), MOST_PARTS)
    for owner in owners:
        pieces = [stop - start for one, start, stop in ranges if one == owner]
        assert len(pieces) <= MOST_PIECES
        assert len(pieces) == 1 or min(pieces) > Grain().piece - 2 * 4096


def test_two_million_values_of_eight_owners_are_cut_in_two_pieces_each():
    assert len(partition(1 << 21, OWNERS[:8])) == 16


def test_a_grain_of_its_own_cuts_what_is_small():
    assert [stop - start for _, start, stop in partition(96, OWNERS[:4], grain=Grain(align=4, piece=12))] == [12] * 8


def test_uplinks_near_the_median_count_as_equal_and_others_as_they_are():
    assert even_out([8.0, 10.0, 12.0, 2.0, 20.0, 0.0]) == [10.0, 10.0, 10.0, 2.0, 20.0, 0.0]
    assert even_out([0.0, 0.0]) == [0.0, 0.0]


def test_peers_whose_estimates_differ_a_little_send_their_frames_themselves():
    told = [1.5e6, 1.6e6, 1.9e6, 1.7e6, 1.9e6, 2.0e6, 1.8e6, 1.7e6]
    for rates in (told, even_out(told)):
        assert spread(3_480_000, [Line(rate, passes_on=True) for rate in rates], 0) is None
    assert spread(3_480_000, [Line(rate, passes_on=True) for rate in (0.6e6, *told[1:])], 0) is not None
