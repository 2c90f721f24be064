"""One machine at a quarter of the others' speed, under virtual time: nobody waits for it, and what it learns counts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import anyio
import pytest

from decentral.consensus.chain import contributions
from decentral.manifest import preset_manifest
from decentral.simulate.scenario import PROFILES, Scenario
from decentral.simulate.simulation import Outcome, simulate
from decentral.simulate.world import World
from decentral.wire.messages import Record

ROUNDS, STEPS, STEP_SECONDS, SLOWER = 12, 8, 1.0, 4.0
STEADY = replace(PROFILES["lab"], crashes=0.0, speed_spread=0.0, jitter_spread=0.1)
LIMITS = {"deadline_floor": 4.0, "deadline_ceiling": 20.0, "min_peers": 1}
OUTER: dict[str, dict[str, float]] = {
    "diloco": {"learning_rate": 1.0, "momentum": 0.0},
    "streaming": {"fragments": 2, "overlap": 1},
}


class LastIsSlow:
    """The third machine, where there is one; nothing else befalls them."""

    def __init__(self, world: World) -> None:
        for host in world.hosts[2:]:
            host.pace.seconds *= SLOWER

    async def run(self) -> None:
        await anyio.sleep_forever()


@cache
def run(hosts: int, preset: str = "diloco", **inner: str | float) -> Outcome:
    manifest = preset_manifest(
        preset,
        run={"rounds": 1_000_000, "salt": "x", "seed": 1},
        swarm=LIMITS,
        inner={"steps": STEPS, **inner},
        outer=OUTER.get(preset, {}),
    )
    scenario = Scenario(manifest, STEADY, 1, hosts, ROUNDS, STEP_SECONDS, lesson="learn", patience=60.0, settle=2000.0)
    outcome = simulate(scenario, LastIsSlow)
    assert outcome.sound, outcome.to_dict()["problems"]
    return outcome


def records(outcome: Outcome) -> list[Record]:
    """Of the last rounds of those that were asked for, when speeds are known."""
    made = sorted(
        (commit.record for commit in outcome.trace.commits.values() if commit.record.frames), key=lambda r: r.round
    )
    return made[ROUNDS // 2 : ROUNDS]


def seconds_a_round(outcome: Outcome) -> float:
    """Over the last half of the curve, whose points are times and losses."""
    (began, _), *_, (ended, _) = last = outcome.to_dict()["loss_curve"][-ROUNDS // 2 :]
    return (ended - began) / (len(last) - 1)


def test_with_a_pace_of_speed_a_slow_peer_makes_fewer_steps_and_is_in_every_round():
    paced = records(run(3, pace="speed"))
    assert len(paced) == ROUNDS // 2
    for record in paced:
        steps = sorted(ref.steps for ref in contributions(record))
        assert len(steps) == 3
        assert steps[1:] == [STEPS, STEPS]
        assert steps[0] <= STEPS // 2
        assert all(ref.based == record.outer_step for ref in contributions(record)), "in time"


def test_rounds_take_as_long_as_without_it_and_less_than_where_it_is_waited_for():
    paced, waiting, without = (seconds_a_round(one) for one in (run(3, pace="speed"), run(3), run(2)))
    assert paced < 0.95 * waiting
    assert paced < 1.1 * without


def test_the_loss_is_not_worse_than_without_it_and_better_than_where_it_is_waited_for():
    """By rounds. Every inner step counts alike, so that its short contributions do not shorten the others'."""
    paced, waiting, without = (one.to_dict()["loss"] for one in (run(3, pace="speed"), run(3), run(2)))
    assert paced < 1.01 * without
    assert paced < waiting


@pytest.mark.long
def test_by_the_clock_rounds_take_the_seconds_and_each_peer_makes_what_fits():
    timed = run(3, pace="clock", seconds=4.0)
    assert 4.0 <= seconds_a_round(timed) < 5.5
    for record in records(timed):
        slow, *fast = sorted(ref.steps for ref in contributions(record))
        assert slow == 1
        assert all(2 <= steps <= 5 for steps in fast)


@pytest.mark.parametrize(
    ("preset", "full"), [("sparseloco", STEPS), pytest.param("streaming", STEPS // 2, marks=pytest.mark.long)]
)
def test_other_ways_of_a_round_pace_a_slow_peer_too(preset: str, full: int):
    """One that trains on while a round is in flight, where fragments take turns, and one that owes what it left out."""
    named = [sorted(ref.steps for ref in contributions(record)) for record in records(run(3, preset, pace="speed"))]
    whole = [steps for steps in named if len(steps) == 3]
    assert len(whole) >= len(named) - 1
    assert all(steps[0] <= full // 2 for steps in whole)
    assert sum(steps[1] >= full for steps in whole) >= len(whole) - 1
