"""A peer at a quarter of the others' speed: it is in nearly every round, with fewer steps, and holds nobody up."""

from __future__ import annotations

import anyio
import pytest

from tests.kit.gossip_learners import Learner
from tests.kit.nodes import tiny_model
from tests.kit.partitions import DENSE, exact_terms

FLOOR, CEILING = 2.0, 30.0
FULL = Learner.interval * Learner.pace  # s of a fast peer's inner steps
ROUNDS = 20


class Slow(Learner):
    pace = 4 * Learner.pace


@pytest.mark.parametrize("weighting", ["tokens"])
def test_a_slow_peer_offers_fewer_steps_and_the_rounds_do_not_wait_for_the_ceiling(run_lab, terms, weighting):
    manifest = exact_terms(terms, DENSE).changed(
        swarm={"deadline_floor": FLOOR, "deadline_ceiling": CEILING, "lease": 6.0, "shrink_after": 60.0},
        outer={"weighting": weighting},
    )

    async def script(lab):
        for kind in (Learner, Learner, Learner, Slow):
            lab.add(kind=kind)
        await lab.all_members()
        await lab.rounds(4)
        before, began = lab.members[0].rounds, anyio.current_time()
        await lab.until(lambda: lab.members[0].rounds >= before + ROUNDS)
        assert anyio.current_time() - began < ROUNDS * (FULL + FLOOR)
        slow = lab.members[3].signer.peer
        records = [commit.record for commit in lab.members[0].log if commit.record.frames][-ROUNDS:]
        taken = [ref for record in records for ref in record.frames if ref.peer == slow]
        assert len(taken) >= 0.9 * ROUNDS
        assert all(1 <= ref.steps < Learner.interval for ref in taken)
        assert all(ref.tokens == Learner.tokens * ref.steps for ref in taken)
        lab.check_equal()

    run_lab(manifest, script, make_model=tiny_model)
