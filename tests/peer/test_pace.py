"""Three peers over real sockets, one of them slower: it makes fewer inner steps, and is in the rounds of the others."""

from __future__ import annotations

import statistics
import threading
import time

from decentral.consensus.chain import contributions
from tests.kit.churn import FULL, adam, enter, records_of, wait_until
from tests.kit.problems import run_terms, run_together

STEPS, ROUNDS = 8, 12
BESIDE = 0.02  # s beside each inner step
SLOWER = 5  # times what a step and that take on the very machine: a busy one makes it slower by as much


def test_a_slow_peer_makes_fewer_steps_instead_of_holding_up_the_others_or_being_late(tmp_path):
    limits = {"deadline_floor": 15.0, "deadline_ceiling": 30.0, "lease": 20.0, "shrink_after": 30.0}
    manifest = run_terms("diloco", run={"rounds": ROUNDS}, inner={"steps": STEPS, "pace": "speed"}, swarm=limits)
    invited, invite, pause = threading.Event(), [], threading.Event()
    digests: dict[int, str] = {}
    names: dict[int, bytes] = {}

    def body(number: int) -> None:
        assert not number or invited.wait(60)
        problem = adam(number)
        with enter(invite[0] if number else manifest, problem, tmp_path / f"peer{number}", tokens_per_step=5) as peer:
            names[number] = peer.swarm.node.driver.me
            if not number:
                invite.append(peer.invite)
                invited.set()
            wait_until(lambda: len(peer.status().members) == FULL)
            took: list[float] = []  # some of them with a round that was waited for
            while not peer.done:
                began = time.monotonic()
                problem.step()
                pause.wait(BESIDE)
                took.append(time.monotonic() - began)
                pause.wait((SLOWER - 1) * statistics.median(took) if number == 2 else 0.0)
            digests[number] = peer.anchor_digest

    run_together(*(lambda n=n: body(n) for n in range(FULL)))
    assert len(set(digests.values())) == 1
    told = [{ref.peer: ref for ref in contributions(record)} for record in records_of(tmp_path / "peer0")]
    both = [record for record in told if set(record) == set(names.values())]
    assert len(both) >= ROUNDS - 3, "it is in the rounds of the others"
    made = {n: sum(record[names[n]].steps for record in both) for n in names}
    assert made[2] < 0.75 * min(made[0], made[1])
    assert made[2] >= len(both)
    assert all(ref.tokens == 5 * ref.steps for record in both for ref in record.values()), "it weighs by what it made"
