"""What a peer says of itself while its training thread waits."""

from types import SimpleNamespace
from typing import Any

import pytest

from decentral.peer.reporting import NOTABLE_WAIT, Reporter


def test_the_short_wait_of_every_round_is_training_and_a_long_one_is_waiting() -> None:
    clock = [100.0]
    node = SimpleNamespace(state="training", resting=False, directory=SimpleNamespace(live=lambda: {b"other": None}))
    peer: Any = SimpleNamespace(done=False, paused=False, swarm=SimpleNamespace(node=node))
    reporter = Reporter(lambda kind, fields: None, lambda: clock[0])
    reporter.waits(True)
    assert reporter._state(peer) == "training"
    clock[0] += NOTABLE_WAIT + 0.1
    assert reporter._state(peer) == "waiting"
    reporter.waits(False)
    assert reporter._state(peer) == "training"
    assert reporter.waited == pytest.approx(NOTABLE_WAIT + 0.1)
