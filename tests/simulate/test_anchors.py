"""The judge of gossip pairs: what excuses that only one of two took a step, and what does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from decentral.manifest import preset_manifest
from decentral.rounds.gossip import UNDECIDED
from decentral.simulate.checker import check_pairs
from decentral.simulate.scenario import PROFILES, Scenario
from decentral.simulate.simulation import simulate
from decentral.simulate.trace import Trace, Verdict

ASKED = 100.0  # s: when the leader asked; its follower stepped at once, and the leader gave up after UNDECIDED
LEADER, FOLLOWER, THIRD = 0, 1, 2


def problems(*troubles, told=True):
    """Of a pair whose follower stepped and whose leader heard nothing.

    ``troubles``: (seconds after the question, host, event, fields).
    """
    now = [0.0]
    trace = Trace(lambda: now[0])
    for host in (LEADER, FOLLOWER, THIRD):
        trace.note(host, 1, "started", peer=bytes([host]) * 32)
    events = [(0.1, FOLLOWER, "swapped", {"round": 7, "partner": bytes([LEADER]) * 32}), *troubles]
    events.append((UNDECIDED, LEADER, "swapped", {"round": 7, "partner": None}))
    if told:
        events.append((UNDECIDED, LEADER, "node_undecided", {"round": 7, "peer": "f", "seconds": UNDECIDED}))
    for seconds, host, event, fields in sorted(events, key=lambda known: known[0]):
        now[0] = ASKED + seconds
        trace.note(host, 1, event, {"before": torch.zeros(1)}, **fields)
    verdict = Verdict()
    check_pairs(trace, preset_manifest("noloco"), verdict)
    return verdict.problems


def cut(a, b):
    return {"pairs": [(a, b)]}


def test_a_pair_made_by_half_with_nobody_dead_and_the_link_alive_is_a_problem():
    said = "[I8] gossip step 7: host 1 took it with host 0, which took it alone"
    assert problems() == [said]
    assert problems(told=False) == [said]


@pytest.mark.parametrize(
    ("seconds", "host", "event", "fields"),
    [(0.2, -1, "cut", cut(LEADER, FOLLOWER)), (7.0, FOLLOWER, "crashed", {}), (0.3, LEADER, "gone", {})],
)
def test_a_death_of_a_peer_or_of_the_link_while_the_leader_waits_is_an_excuse(seconds, host, event, fields):
    assert problems((seconds, host, event, fields)) == []


@pytest.mark.parametrize(
    ("seconds", "host", "event", "fields"),
    [
        (-0.5, -1, "cut", cut(LEADER, FOLLOWER)),  # before it asked
        (-12.0, FOLLOWER, "crashed", {}),
        (UNDECIDED + 0.5, FOLLOWER, "crashed", {}),  # after it gave up
        (0.2, -1, "cut", cut(LEADER, THIRD)),  # of another link
        (0.2, THIRD, "crashed", {}),
        (0.2, LEADER, "left", {}),  # it says goodbye, and can be asked and answered yet
        (0.2, FOLLOWER, "slept", {}),  # without a link that broke
    ],
)
def test_what_came_before_or_after_or_befell_others_is_none(seconds, host, event, fields):
    assert len(problems((seconds, host, event, fields))) == 1


def test_a_leader_that_died_before_it_could_say_that_it_waits_is_an_excuse():
    assert problems((1.0, LEADER, "crashed", {}), told=False) == []
    assert len(problems((1.0, -1, "cut", cut(LEADER, FOLLOWER)), told=False)) == 1, "a living one says that it waits"


@pytest.mark.long
def test_peers_that_nothing_befalls_meet_in_nearly_every_step():
    """They drifted apart by more seconds than they waited, and met by chance."""
    calm = replace(PROFILES["lab"], crashes=0.0)
    limits = {"deadline_floor": 2.0, "deadline_ceiling": 60.0, "min_peers": 1}
    manifest = preset_manifest(
        "noloco", run={"rounds": 1_000_000, "salt": "x", "seed": 1}, inner={"steps": 5}, swarm=limits
    )
    terms = {"hosts": 6, "rounds": 14, "step_seconds": 6.0, "calm_start": True, "lesson": "noise", "patience": 600.0}
    found = simulate(Scenario(manifest, calm, 1, **terms)).to_dict()
    assert found["problems"] == []
    assert 2 * found["pairs"] / (2 * found["pairs"] + found["unpaired"]) > 0.8
    assert found["utilisation"] > 0.8
