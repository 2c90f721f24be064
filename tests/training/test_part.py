"""Which fragments a machine trains, by its memory and by what others train."""

from __future__ import annotations

import pytest

from decentral.errors import ConfigError
from decentral.training.part import Needs, choose_part

NEEDS = Needs(process=100, step=16, rounds=8, mapped=20)
EVEN = [10, 10, 10, 10]  # 160 bytes each to train, and 200 for a turn


@pytest.mark.parametrize(
    ("memory", "others", "part"),
    [
        (10_000, [], range(4)),
        (940, [], range(4)),  # 100 + 200 + 4 * 160
        (939, [], range(3)),
        (619, [range(1, 4)], range(1)),
        (460, [range(3)], range(3, 4)),
        (460, [range(2, 4), range(1, 4)], range(1)),
        (620, [range(2, 4)], range(2)),
        (620, [range(2)], range(2, 4)),
        (620, [range(1), range(3, 4)], range(1, 3)),
        (460, [range(1, 60_000)], range(1)),  # a claim of more than there is
        (460, [range(60_000, 65_000), range(1, 4)], range(1)),
    ],
)
def test_as_many_fragments_as_fit_are_trained_where_fewest_others_do(memory, others, part):
    assert choose_part(EVEN, memory, others, NEEDS) == part


def test_machines_that_begin_at_once_part_by_their_ids():
    drawn = [choose_part(EVEN, 620, (), NEEDS, draw=bytes([number])) for number in range(40)]
    assert set(drawn) == {range(2), range(2, 4)}
    assert 10 < drawn.count(range(2)) < 30


def test_of_fragments_that_differ_the_part_is_taken_that_fits():
    assert choose_part([50, 10, 10], 1420, (), NEEDS) == range(1, 3)
    assert choose_part([10, 10, 50], 1420, (), NEEDS) == range(2)


def test_a_machine_without_room_for_one_hears_how_much_it_takes():
    with pytest.raises(ConfigError, match=r"takes 0\.00 GB for one of its 4 fragments"):
        choose_part(EVEN, 459, (), NEEDS)


def test_what_fits_without_files_is_more_than_what_fits_with_them():
    assert Needs().in_memory(EVEN) > Needs().in_files(EVEN, range(4))
