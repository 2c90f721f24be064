"""How often a newcomer asks to be let in while nobody can."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import anyio
import pytest

from decentral.consensus import learner
from decentral.consensus.round_state import RoundState
from decentral.rounds.driver import JOIN_LONGEST

SECONDS = 60


def test_a_newcomer_asks_more_and_more_rarely_and_is_let_in_all_the_same(
    run_lab: Any, terms: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asked everybody every second: of 64 peers that began at once, each was asked two hundred times."""
    asked: list[float] = []
    take_join = learner.take_join

    def noted(state: RoundState, sender: bytes, request: Any, now: float) -> None:
        asked.append(now)
        take_join(state, sender, request, now)

    async def script(lab: Any) -> None:
        members = [lab.add() for _ in range(3)]
        await lab.all_members()
        await lab.rounds(1)
        lab.cut(members[:1], members[1:])  # alone it is no majority
        await anyio.sleep(5)
        monkeypatch.setattr(learner, "take_join", noted)
        newcomer = lab.add()
        lab.cut([newcomer], members[1:])
        await anyio.sleep(SECONDS)
        assert not newcomer.node.driver.is_member
        lab.heal(members[:1], members[1:])
        await lab.until(lambda: newcomer.node.driver.is_member, limit=2 * JOIN_LONGEST)

    run_lab(terms("sparseloco", lease=600.0, shrink_after=1200.0), script)
    before = [now for now in asked if now < asked[0] + SECONDS]
    assert 5 <= len(before) <= 4 + SECONDS / JOIN_LONGEST + 1
    waits = [later - now for now, later in pairwise(before)]
    assert waits == pytest.approx(sorted(waits)), "each as long as the one before, or longer"
