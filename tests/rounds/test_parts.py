"""Members that train a part of the model, among those that train all of it."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from decentral.consensus.chain import contributions
from tests.kit.nodes import STEP, Lab, Member, scene, small_terms

FRAGMENTS = 2
FLOOR = 3.0  # s that a late offer is waited for at least: three times a round


class OfPart(Member):
    """It trains the first fragment alone."""

    part = range(1)
    hangs = False

    def __init__(self, lab: Lab, number: int, founder: bool) -> None:
        super().__init__(lab, number, founder)
        self.node.directory.own.train(self.part)

    async def _train(self) -> None:
        driver = self.node.driver
        while True:
            await anyio.sleep(0.05)
            ours = driver.head.fragment(FRAGMENTS) in self.part or driver.untrained == driver.head.hash
            self.idle = self.hangs or not ours
            if not self.idle:
                with anyio.move_on_after(1.5 * STEP):
                    await super()._train()


class OfOther(OfPart):
    part = range(1, 2)


class Silent(OfPart):
    """It does not say so."""

    def __init__(self, lab: Lab, number: int, founder: bool) -> None:
        super().__init__(lab, number, founder)
        self.node.directory.own.train(None)


def terms(preset: str) -> Any:
    return small_terms(preset, deadline_floor=FLOOR).changed(outer={"fragments": FRAGMENTS})


def named(member: Member) -> dict[int, list[int]]:
    """How many contributed to the rounds of each fragment."""
    found: dict[int, list[int]] = {fragment: [] for fragment in range(FRAGMENTS)}
    for commit in member.log:
        if contributions(commit.record):
            found[commit.record.fragment].append(len(contributions(commit.record)))
    return found


async def seconds_of(lab: Lab, rounds: int) -> float:
    began = anyio.current_time()
    await lab.rounds(rounds)
    return anyio.current_time() - began


@pytest.mark.parametrize("preset", ["sparseloco", "diloco"])
@scene(terms, peers=[None, None, OfPart])
async def test_who_trains_a_part_contributes_to_that_and_is_not_waited_for_in_the_rest(lab, preset):
    await lab.rounds(2)
    before = len(lab.members[0].log)
    assert await seconds_of(lab, 12) < 12 * (STEP + 1.0), "no round waits for a deadline"
    lab.members[0].log = lab.members[0].log[before:]
    counts = named(lab.members[0])
    assert set(counts[1]) == {2}, "whole peers alone"
    assert set(counts[0]) == {3}, "all"
    lab.check_equal()


@pytest.mark.parametrize("preset", ["sparseloco"])
@scene(terms, peers=[None, None, Silent])
async def test_one_that_did_not_say_so_would_hold_up_the_rest(lab, preset):
    await lab.rounds(2)
    assert await seconds_of(lab, 12) > 6 * FLOOR


@pytest.mark.parametrize("preset", ["sparseloco", "diloco"])
@scene(terms, peers=[OfPart, OfOther])
async def test_parts_that_make_up_a_whole_go_on_by_themselves(lab, preset):
    await lab.rounds(8)
    assert {count for counts in named(lab.members[0]).values() for count in counts} == {1}
    lab.check_equal()


@pytest.mark.parametrize("preset", ["sparseloco"])
@scene(terms, peers=[None, OfPart])
async def test_who_says_more_than_there_is_harms_nobody(lab, preset):
    lab.members[1].node.directory.own.train(range(60_000, 65_000))
    await lab.rounds(6)
    lab.check_equal()


@pytest.mark.parametrize("preset", ["sparseloco", "diloco"])
@scene(terms, peers=[OfPart, OfPart, OfOther])
async def test_a_turn_passes_whose_one_trainer_is_there_and_hangs(lab, preset):
    await lab.rounds(4)
    lab.members[2].hangs = True
    await lab.rounds(6)
    assert lab.members[2] in lab.alive()
    lab.check_equal()


@pytest.mark.parametrize("preset", ["sparseloco"])
@scene(terms, peers=[OfPart, OfPart, OfOther])
async def test_a_turn_passes_whose_one_trainer_has_left(lab, preset):
    await lab.rounds(4)
    await lab.members[2].end()
    await lab.rounds(6)
    lab.check_equal()


@pytest.mark.parametrize("preset", ["diloco"])
@scene(terms, peers=[None, OfPart, OfPart])
async def test_beside_one_who_trains_a_fragment_nothing_of_others_counts(lab, preset):
    """They offer in every turn, as who believed that nobody trains it would."""
    for member in lab.members[1:]:
        member.part = range(FRAGMENTS)
    await lab.rounds(9)
    assert set(named(lab.members[0])[1][2:]) == {1}
    lab.check_equal()
