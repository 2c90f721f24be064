"""SIGKILL of a real peer in every phase of a round: the survivors agree, nobody applies twice, nobody hangs."""

from __future__ import annotations

import pytest

PEERS = 4  # one dies, the others are a majority
COMMON = [
    "before offer",
    "after offer",
    "before vote",
    "after vote logged",
    "before vote is sent",
    "after vote is sent",
    "before log",
    "after log",
    "after decide",
]
LEADER = [
    "before proposal is sent",
    "after proposal is sent",
    "before commit is sent",
    "after commit is sent",
]
GATHER = ["before push", "after push"]
REDUCE = ["before plan is sent", "after plan is sent", "before push", "after push"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("preset", "phases"),
    [
        ("sparseloco", COMMON + LEADER + GATHER),
        ("diloco", LEADER + REDUCE),
    ],
    ids=["gather", "reduce"],
)
def test_survivors_agree_whatever_phase_a_peer_is_killed_in(real_swarm, preset, phases):
    """One swarm lives through all of it: each of the dead is replaced, and nobody of the first need be left."""
    swarm = real_swarm(preset)
    for _ in range(PEERS):
        swarm.add()
    for phase in phases:
        swarm.settle()
        swarm.kill_one(phase)
        swarm.add()
        swarm.go_on(2)
    assert len(swarm.alive()) == PEERS
    swarm.check()
    assert max(worker.steps() for worker in swarm.workers) > 2 * len(phases)
