"""One-way trips from the last inner step to the new anchor, as docs/cost.md counts them: messages take one, and no peer
needs time for anything.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from decentral.consensus.machine import TICK
from decentral.wire.frames import Header
from tests.kit.machines import Swarm

COST = Path(__file__).parents[2] / "docs" / "cost.md"


def trips_of_a_round(swarm: Swarm, takes: Callable[[object], int]) -> list[tuple[int, str]]:
    """Run one round, in which a message arrives after as many trips as it ``takes``; return when each came, as what.

    A tick goes by before each trip, as it does where one takes longer.
    """
    done, came = {peer: swarm.rounds_done(peer) + 1 for peer in swarm.alive()}, []
    swarm.offer_all()
    on_the_way = [(takes(item[2]), item) for item in swarm.queue]
    while any(swarm.rounds_done(peer) < goal for peer, goal in done.items()):
        swarm.now += TICK
        trip = min(arrives for arrives, _ in on_the_way)
        swarm.queue = [item for arrives, item in on_the_way if arrives == trip]
        on_the_way = [(arrives, item) for arrives, item in on_the_way if arrives > trip]
        for sender, to, message in tuple(swarm.queue):
            came.append((trip, "frame" if isinstance(message, tuple) else type(message).__name__))
            before, swarm.queue = swarm.queue[1:], swarm.queue[:1]
            assert swarm.queue == [(sender, to, message)]
            swarm.deliver_one()
            on_the_way += [(trip + takes(item[2]), item) for item in swarm.queue]
            swarm.queue = before
    return sorted(set(came))


def takes_one(message: object) -> int:
    return 1


def frames_take(trips: int) -> Callable[[object], int]:
    def takes(message: object) -> int:
        return trips if isinstance(message, tuple) and isinstance(message[1], Header) else 1

    return takes


@pytest.mark.parametrize("peers", [2, 6, 10])
def test_a_gather_of_small_frames_takes_four_trips(peers):
    swarm = Swarm(peers)
    for _ in range(3):
        assert trips_of_a_round(swarm, takes_one) == [
            (1, "Offer"),
            (1, "frame"),
            (2, "Proposal"),
            (3, "Vote"),
            (4, "Commit"),
        ]


def test_a_gather_takes_three_trips_after_its_last_frame():
    """The leader proposes what it holds, and nobody votes for what it does not."""
    swarm = Swarm(6)
    assert trips_of_a_round(swarm, frames_take(9)) == [
        (1, "Offer"),
        (9, "frame"),
        (10, "Proposal"),
        (11, "Vote"),
        (12, "Commit"),
    ]


def test_the_table_of_trips_in_the_docs_names_these_messages():
    _, _, section = COST.read_text(encoding="utf-8").partition("## Trips of a round")
    table = [line.split("|")[1].strip() for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")]
    assert table[2:] == ["offer, frame", "proposal", "vote", "commit"]
