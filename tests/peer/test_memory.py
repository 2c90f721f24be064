"""What a peer no longer needs it does not hold: for a model of a billion parameters each vector is 4 GB."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

from decentral.peer import join
from tests.kit.participation import NET, train
from tests.kit.problems import Problem, run_terms


def anchors_left(out: Path, rounds: int) -> list[object]:
    """Of those that a peer began with, what is still there when it has made so many rounds."""
    problem = Problem(0)
    with join(
        run_terms("sparseloco", run={"rounds": 100}), problem.model, problem.optimizer, out=out, **NET, alone=True
    ) as peer:
        begun = [weakref.ref(anchor_N) for anchor_N in peer.swarm.node.replica.anchors]
        train(peer, problem, rounds)
        gc.collect()
        return [anchor() for anchor in begun if anchor() is not None]


def test_after_a_few_rounds_nothing_is_left_of_the_anchor_that_a_peer_began_with_or_resumed_from(
    tmp_path: Path,
) -> None:
    assert anchors_left(tmp_path, rounds=3) == []
    assert anchors_left(tmp_path, rounds=6) == []
