"""A small dose of ``make simulate``: real code, virtual time, seeded faults, and a checker that reads what is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from decentral.manifest import preset_manifest
from decentral.simulate.scenario import PROFILES
from decentral.simulate.simulation import forecast, simulate
from tests.simulate import await_points, run
from tests.simulate.draws import drawn, of_many_groups, scenario
from tests.simulate.scenes import CALM, befalls, until_true

ROOT = Path(__file__).parents[2]
ROUNDS = 20  # the planted bugs of tests/faults are caught within 20; more seeds show more than more rounds of each


def seeds(few: list[int], *more: int) -> list[Any]:
    """These, and in the long tests more of them."""
    return [*few, *(pytest.param(seed, marks=pytest.mark.long) for seed in more if seed not in few)]


@pytest.mark.parametrize("seed", seeds([1, 2, 3, 6], *range(1, 61)))
def test_no_guarantee_is_broken_and_nothing_hangs_in_any_weather(seed):
    """Some 100 rounds, and 1,300 with the long ones: 20 or so each.

    A swarm that is away most of the time makes fewer, one that gossips more.
    """
    assert simulate(scenario(seed, ROUNDS)).to_dict()["problems"] == [], run.replay(seed, ROUNDS)


@pytest.mark.parametrize("seed", seeds([1], 2, 5, *range(10, 26)))
def test_no_guarantee_is_broken_where_three_or_five_vote_for_more(seed):
    """``make simulate ARGS=--committees`` has more. Some 20 rounds, and 300 with the long ones."""
    outcome = simulate(scenario(seed, 20, kind="committees"))
    assert outcome.scenario.seats < outcome.scenario.hosts
    assert outcome.to_dict()["problems"] == [], run.replay(seed, 20, "committees")


@pytest.mark.parametrize("seed", seeds([1, 2, 3], *range(4, 25)))
def test_no_guarantee_is_broken_where_some_train_a_part_of_the_model(seed):
    """``make simulate ARGS=--parts`` has more."""
    outcome = simulate(scenario(seed, 20, kind="parts"))
    assert outcome.scenario.parts
    assert outcome.to_dict()["problems"] == [], run.replay(seed, 20, "parts")


@pytest.mark.parametrize("seed", seeds([2, 3, 5], 1, *range(6, 15)))
def test_no_guarantee_is_broken_where_some_share_a_replica(seed):
    """``make simulate ARGS=--groups`` has more. Every await point of a step is one at which a machine may end."""
    outcome = simulate(scenario(seed, 20, kind="groups"))
    assert outcome.scenario.groups
    assert any(outcome.trace.of("group_formed")), "some were one replica"
    assert outcome.to_dict()["problems"] == [], run.replay(seed, 20, "groups")


@pytest.mark.parametrize("groups", [3, pytest.param(8, marks=pytest.mark.long)])
def test_no_guarantee_is_broken_where_many_come_that_share_replicas_of_four(groups):
    """``make simulate ARGS=--many-groups`` has 64 of them. All form groups in calm, and some crash."""
    outcome = simulate(of_many_groups(3, 5, groups))
    before = [entry for entry in outcome.trace.of("group_formed") if entry.time < first_crash(outcome)]
    assert len({entry.host for entry in before}) == 4 * groups
    assert any(outcome.trace.of("group_over"))
    assert outcome.to_dict()["problems"] == []


def first_crash(outcome):
    return min(entry.time for entry in outcome.trace.of("crashed"))


@pytest.mark.long
def test_peers_of_two_islands_on_one_chain_find_one_another_again():
    """All were started anew with one address each, in two groups, of which neither had an address of the other."""
    assert simulate(scenario(227, 50, kind="committees")).to_dict()["problems"] == []


@pytest.mark.long
def test_in_a_swarm_of_24_peers_21_vote():
    outcome = simulate(replace(drawn(2, 4), profile=CALM, hosts=24))
    assert outcome.sound, outcome.to_dict()["problems"]
    large = [c for c in outcome.trace.commits.values() if len(c.record.members) == 24 and c.record.frames]
    assert large
    assert all(11 <= len(commit.certificate.votes) <= 21 for commit in large)


@pytest.mark.long
@pytest.mark.parametrize("seed", [216, 284, 3159])
def test_what_once_failed_holds(seed):
    """Swarms that stood still for good: bound to a record that no member voted for, and with two records of one ballot,
    as its leader restarted; and an error of the judge.
    """
    assert simulate(scenario(seed, 50)).to_dict()["problems"] == []


@pytest.mark.parametrize("seed", seeds([2, 23], 7, 24, 31, 36))
def test_no_guarantee_is_broken_where_receivers_remember_what_each_sender_sent(seed):
    """Peers crash, sleep, are parted and come back; sums of senders are compared, and anchors computed from frames."""
    scenario, feedback = drawn(seed, 20), "ef21" if seed % 2 else "econtrol(eta=0.001)"
    manifest = scenario.manifest.changed(
        compressor={"chain": "topk(k=128, chunk=4096)", "feedback": feedback}, outer={"norm_clip": None}
    )
    assert simulate(replace(scenario, manifest=manifest)).to_dict()["problems"] == []


def test_one_seed_is_one_trace_in_every_process():
    seed = 3
    code = (
        "from decentral.simulate.simulation import simulate; from tests.simulate.draws import drawn; "
        f"print(simulate(drawn({seed}, 3)).trace.hash)"
    )
    env = {**os.environ, "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, env=env)
    assert done.stdout == simulate(drawn(seed, 3)).trace.hash + "\n"
    assert done.stdout != simulate(drawn(seed + 1, 3)).trace.hash + "\n"


def test_the_json_of_an_outcome_holds_what_is_promised():
    outcome = simulate(replace(drawn(2, 4), profile=PROFILES["lab"])).to_dict()
    promised = "rounds commits divergence lost_updates duplicated_updates hangs trace_hash bytes_per_peer utilisation"
    assert set(promised.split()) <= set(outcome)
    assert outcome["rounds"] >= 4
    assert 0 < outcome["utilisation"] <= 1
    json.dumps(outcome)


def test_a_failing_seed_is_named_with_the_command_that_replays_it():
    broken = {"seconds": 1.0, "problems": ["[I1] two records"]}
    broken |= dict.fromkeys(("rounds", "commits", "divergence", "lost_updates", "duplicated_updates", "hangs"), 1)
    total = run.Total()
    total.add(7, broken)
    assert total.failed == {7: ["[I1] two records"]}
    assert run.replay(7, 50, "committees") == "python -m tests.simulate.run --seeds 7 --rounds 50 --committees --trace"
    assert run.replay(7, 50) == "python -m tests.simulate.run --seeds 7 --rounds 50 --trace"


def test_a_small_model_that_four_peers_train_learns_more_than_one_that_trains_alone():
    terms = {"run": {"rounds": 100, "salt": "x", "seed": 1}, "inner": {"steps": 12}}
    manifest = preset_manifest("diloco", **terms)
    options = {"peers": 4, "profile": "lab", "seed": 1, "rounds": 10, "step_seconds": 1.0, "parameters": 10_000}
    found = forecast(manifest, **options, learn=True)
    assert found["problems"] == []
    assert found["loss"] == found["loss_curve"][-1][1] < 0.9 * found["loss_alone"]
    assert found["loss_curve"][0][1] > found["loss_alone"]
    assert found["steps"] <= found["steps_alone"], "in the same time; who is alone waits for nobody"


@pytest.mark.parametrize(
    ("kind", "every"),
    [("reduce", 9 * 47), *(pytest.param(k, 47, marks=pytest.mark.long) for k in await_points.EXHAUSTED)],
)
def test_a_crash_at_any_await_point_of_a_round_breaks_nothing(kind, every):
    """One of so many points; ``make await-points`` tries all."""
    for point in await_points.points(kind, every=every):
        assert await_points.tried(point)[2] == [], f"python -m tests.simulate.await_points --point {point}"


def test_a_swarm_of_which_half_or_more_falls_at_once_comes_back():
    quiet = replace(PROFILES["cliff"], crashes=0.0, sleeps=0.0, partitions=0.0, cliff_every=4, away=2.0)
    outcome = simulate(replace(drawn(2, 12), profile=quiet, hosts=4))
    assert outcome.sound, outcome.to_dict()["problems"]
    falls = [entry.fields["hosts"] for entry in outcome.trace.of("cliff")]
    assert len(falls) >= 2
    assert all(len(struck) >= 2 for struck in falls)


def test_who_holds_an_invite_of_nobody_that_is_left_asks_for_another_when_it_is_calm():
    """Its inviter loses its disk and its key before it is back on the network."""

    async def inviter_is_lost(world):
        _, newcomer, inviter = world.hosts
        world.isolate(newcomer)
        for host in (newcomer, inviter):
            host.crash()
            await host.ended.wait()
        newcomer.forget()
        world._group.start_soon(newcomer.live, world.network.transport(inviter.signer).addresses())
        inviter.forget()
        world.start(inviter)

    outcome = simulate(replace(drawn(2, 5), profile=CALM, hosts=3), befalls(inviter_is_lost))
    assert outcome.sound, outcome.to_dict()["problems"]


def test_a_machine_that_is_started_twice_in_one_moment_runs_one_process():
    """By what befell it, and by the judge who wants all up again. The first was judged, and the second ran."""

    async def started_twice(world):
        host = world.hosts[1]
        host.crash()
        await host.ended.wait()
        world.start(host)
        world.start(host)

    outcome = simulate(replace(drawn(2, 5), profile=CALM, hosts=3), befalls(started_twice))
    assert outcome.sound, outcome.to_dict()["problems"]
    assert sum(entry.host == 1 for entry in outcome.trace.of("started")) == 2


def test_a_replica_does_without_a_stage_until_the_machine_is_back():
    """And is cut anew then, though the group that went on without it had nothing to complain of."""

    def is_in_a_group(host):
        return host.process is not None and host.process.side is not None and host.process.side.inbox is not None

    async def stage_is_lost(world):
        sharing = [host for host in world.hosts if host.shares_with is not None]
        await until_true(lambda: all(map(is_in_a_group, sharing)))
        sharing[1].crash()
        await sharing[1].ended.wait()
        others = [host for host in sharing if host is not sharing[1]]
        await until_true(lambda: all(is_in_a_group(host) and host.process.side.inbox.record.hole for host in others))
        world.start(sharing[1])
        await until_true(lambda: all(map(is_in_a_group, sharing)))

    usual = scenario(1, 60, kind="groups")
    manifest = usual.manifest.changed(outer={"skip": 0.5, "overlap": 0})
    few = {"hosts": 5, "groups": 1, "stages": 4, "spares": 0, "step_seconds": 1.0}
    four = replace(usual, manifest=manifest, profile=CALM, **few)
    outcome = simulate(four, befalls(stage_is_lost))
    assert outcome.sound, outcome.to_dict()["problems"]
    left_out = [len(entry.fields["left_out"]) for entry in outcome.trace.of("group_formed")]
    assert [count for count, _ in groupby(left_out)] == [0, 1, 0]
