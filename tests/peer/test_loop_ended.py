"""A boundary at which the swarm's side ends."""

from __future__ import annotations

from concurrent.futures import CancelledError
from types import SimpleNamespace

import pytest

from decentral.errors import VersionError
from decentral.peer.boundary import Boundary
from decentral.training.outer_loop import LoopControl
from decentral.training.swarm_side import LoopEnded


@pytest.mark.parametrize("how", [LoopEnded("not running"), CancelledError()], ids=lambda how: type(how).__name__)
def test_a_boundary_raises_what_ended_the_swarms_side(how: BaseException) -> None:
    async def step_boundary() -> set[int]:
        raise how

    def nothing() -> None:
        pass

    part = SimpleNamespace(
        loop=SimpleNamespace(schedule=SimpleNamespace(stepped=nothing), step_boundary=step_boundary),
        swarm=SimpleNamespace(reason=lambda: VersionError("wire version 1, this is 4")),
        behind=SimpleNamespace(check=nothing),
        giving=SimpleNamespace(stepped=lambda *, paused: None),
    )
    with pytest.raises(VersionError):
        Boundary.act(SimpleNamespace(_control=LoopControl()), part)  # type: ignore[arg-type]
