"""What a commit has a peer book: of the right frame, and not made where messages wait."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from decentral.flow.waiting import inline
from decentral.replica.contribution import Contribution


def test_what_found_no_room_is_read_again_when_it_is_offered_again(run_lab: Any, terms: Any) -> None:
    """It was taken for a frame that holds nothing, and the commit that named it could not be applied."""

    async def script(lab: Any) -> None:
        first = lab.add()
        first.node.replica.contents.unpacked.capacity = 1
        await anyio.sleep(6)  # alone it offers, and may not commit: a membership without it goes first
        assert first.node.driver.pending is not None
        second = lab.add()
        second.node.replica.contents.unpacked.capacity = 1
        await lab.all_members()
        await lab.rounds(2)
        lab.check_equal()

    run_lab(terms("sparseloco", min_peers=2), script)


def test_the_feedback_of_a_reduce_is_not_put_together_on_the_event_loop(
    run_lab: Any, terms: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is as long as the model: no vote was answered, and no lease renewed, while it was copied."""
    where: list[bool] = []
    working: list[object] = []
    feedback_after = Contribution.feedback_after

    async def on_a_thread(work: Any, *args: Any) -> Any:
        def marked(*given: Any) -> Any:
            working.append(work)
            try:
                return work(*given)
            finally:
                working.pop()

        return await inline(marked, *args)

    def noted(made: Contribution, record: Any) -> Any:
        where.append(bool(working))
        return feedback_after(made, record)

    async def script(lab: Any) -> None:
        for _ in range(3):
            lab.add().node.driver.state.offload = on_a_thread
        await lab.all_members()
        monkeypatch.setattr(Contribution, "feedback_after", noted)
        await lab.rounds(2)
        lab.check_equal()

    run_lab(terms("muloco"), script)
    assert where
    assert all(where)
