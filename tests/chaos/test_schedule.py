"""The plan of a torment: made from its seed alone, and never with a majority away unless everybody is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.chaos.faults import FAULTS
from tests.chaos.schedule import EVERYBODY, KINDS, QUIET, RECOVERY, Fault, Plan, draw, kinds_of

HOUR = Plan(seed=1, seconds=3600, small_disks=(5, 6))


def away(fault: Fault, at: float) -> bool:
    """Whether the victim is down or stopped at that moment."""
    return fault.kind != "clock" and fault.at <= at <= fault.at + fault.seconds


def test_equal_seeds_give_equal_schedules_and_others_others():
    assert draw(HOUR) == draw(HOUR)
    assert draw(HOUR) != draw(replace(HOUR, seed=2))


@pytest.mark.parametrize("num_peers", [3, 4, 6, 8])
@pytest.mark.parametrize("seed", range(3))
def test_a_majority_is_always_left(num_peers, seed):
    plan = Plan(seed=seed, seconds=1200, num_peers=num_peers, small_disks=(num_peers - 1,))
    faults = [fault for fault in draw(plan) if fault.kind != EVERYBODY]
    assert len(faults) > 60
    for fault in faults:
        hit = {other.victim for other in faults if away(other, fault.at)}
        assert 2 * (num_peers - len(hit)) > num_peers


def test_everybody_dies_now_and_then_with_peace_before_and_after():
    faults = draw(HOUR)
    deaths = [fault.at for fault in faults if fault.kind == EVERYBODY]
    assert len(deaths) == 6
    for death in deaths:
        near = [f for f in faults if f.kind != EVERYBODY and death - QUIET < f.at < death + RECOVERY]
        assert not near


def test_elders_are_never_killed_and_only_small_disks_are_filled():
    for fault in draw(HOUR):
        kind = next((kind for kind in KINDS if kind.name == fault.kind), None)
        assert kind is None or not (kind.spares_elders and fault.victim < HOUR.num_elders)
        assert fault.kind != "disk_full" or fault.victim in HOUR.small_disks


def test_an_hour_plans_1500_kills_and_every_kind_of_fault():
    planned = kinds_of(draw(HOUR))
    killing = {"kill", "kill_daemon", "corrupt_checkpoint", "cut_journal"}
    assert sum(planned[kind] for kind in killing) + HOUR.num_peers * planned[EVERYBODY] >= 1500
    assert set(planned) == {kind.name for kind in KINDS} | {EVERYBODY}
    assert set(FAULTS) == {kind.name for kind in KINDS}
