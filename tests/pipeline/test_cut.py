"""Cuts of a model for machines that are to be one replica: a table of cases."""

from __future__ import annotations

from itertools import pairwise

import pytest

from decentral.pipeline.cut import Machine, cut_for, holes_of

GB = 1_000_000_000
HOME, AWAY = frozenset({"192.168.1.0/24"}), frozenset({"10.0.0.0/24"})


def needs(part: range) -> int:
    return len(part) * GB


def machine(memory: float = 8, speed: float = 1.0, uplink: float | None = None, home: frozenset[str] = HOME) -> Machine:
    return Machine(int(memory * GB), speed, uplink, home)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_equal_machines_get_equal_parts_that_make_up_the_model(count: int) -> None:
    cut = cut_for([machine()] * count, [10] * 12, needs, 1.0)
    assert cut is not None
    assert [len(part) for part in cut.parts] == [12 // count] * count
    assert cut.parts[0].start == 0
    assert cut.parts[-1].stop == 12
    assert all(one.stop == other.start for one, other in pairwise(cut.parts))
    assert sorted(cut.machines) == list(range(count))


def test_a_machine_twice_as_fast_gets_twice_the_work() -> None:
    cut = cut_for([machine(speed=1.0), machine(speed=2.0)], [10] * 12, needs, 1.0)
    assert cut is not None
    assert {place: len(part) for place, part in zip(cut.machines, cut.parts, strict=True)} == {0: 4, 1: 8}


def test_memory_comes_before_speed() -> None:
    cut = cut_for([machine(memory=3, speed=10.0), machine(memory=9)], [10] * 12, needs, 1.0)
    assert cut is not None
    assert {place: len(part) for place, part in zip(cut.machines, cut.parts, strict=True)} == {0: 3, 1: 9}


def test_no_cut_where_the_memory_of_all_does_not_hold_the_model() -> None:
    assert cut_for([machine(memory=3), machine(memory=8)], [10] * 12, needs, 1.0) is None


def test_the_machine_with_the_thin_uplink_stands_at_an_end() -> None:
    """In the middle it would send twice as much."""
    away = [frozenset({name}) for name in "abc"]
    fleet = [machine(uplink=uplink, home=home) for uplink, home in zip((9.0, 1.0, 9.0), away, strict=True)]
    cut = cut_for(fleet, [1] * 3, needs, 1.0)
    assert cut is not None
    assert cut.machines[1] != 1


def test_machines_of_one_home_stand_beside_each_other() -> None:
    fleet = [machine(uplink=1.0, home=home) for home in (HOME, AWAY, HOME, AWAY)]
    cut = cut_for(fleet, [1] * 4, needs, 100.0)
    assert cut is not None
    places = [cut.machines.index(number) for number in (0, 2)]
    assert abs(places[0] - places[1]) == 1


def test_an_embedding_costs_memory_and_no_time() -> None:
    cut = cut_for([machine(), machine()], [0, 0, 0, 10, 10, 10, 10], needs, 1.0)
    assert cut is not None
    assert [part.stop for part in cut.parts] == [5, 7]


def test_where_memory_falls_short_one_run_of_fragments_between_two_stages_is_left_out() -> None:
    fleet, holes = [machine(memory=5)] * 2, holes_of([True] * 12, 3)
    assert cut_for(fleet, [10] * 12, needs, 1.0) is None
    cut = cut_for(fleet, [10] * 12, needs, 1.0, [hole for hole in holes if len(hole) == 2])
    assert cut is not None
    assert cut.parts == (range(5), range(7, 12))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_what_is_left_out_lies_between_stages_and_all_else_is_trained(count: int) -> None:
    for hole in holes_of([True] * 8, 4):
        cut = cut_for([machine()] * count, [10] * 8, needs, 1.0, [hole])
        if len(hole) <= 8 - count:
            assert cut is not None
            assert [f for part in cut.parts for f in part] == [f for f in range(8) if f not in hole]
            assert hole.start in {part.stop for part in cut.parts}
        else:
            assert cut is None


def test_nothing_is_left_out_that_changes_the_form_of_states_nor_the_first_nor_the_last() -> None:
    assert holes_of([True, True, False, True, True, True], 2) == [range(1, 2), range(3, 4), range(4, 5), range(3, 5)]
    assert holes_of([True] * 4, 0) == []
    assert holes_of([True] * 2, 2) == []


def test_the_same_question_has_the_same_answer() -> None:
    fleet = [machine(speed=speed) for speed in (1.0, 1.5, 1.2)]
    assert len({repr(cut_for(fleet, [3, 5, 2, 9, 4, 4], needs, 1.0)) for _ in range(3)}) == 1
