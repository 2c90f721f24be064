"""SIGKILL of a real peer in every phase of a round: the survivors agree, nobody applies twice, nobody hangs."""

from __future__ import annotations

import pytest

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


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("preset", "phases"),
    [("sparseloco", COMMON + LEADER + GATHER), ("diloco", LEADER + REDUCE)],
    ids=["gather", "reduce"],
)
def test_survivors_agree_whatever_phase_a_peer_is_killed_in(real_swarm, preset, phases):
    swarm = real_swarm(preset)
    for _ in range(3):
        swarm.add()
    victim = swarm.add()
    swarm.wait_for_members(4)
    for number, phase in enumerate(phases):
        victim.order_to(f"die {phase}")
        victim.process.wait(60)
        assert victim.process.returncode == -9, f"{phase}: the peer never came there"
        replacement = swarm.add() if number + 1 < len(phases) else None
        swarm.go_on(2)
        if replacement is not None:
            victim = replacement
            victim.wait_for(lambda w: w.steps() >= 0, "the replacement takes part")
    swarm.check()
    assert swarm.workers[0].steps() > 2 * len(phases)
