"""State that keepers of redundant copies give each other."""

from __future__ import annotations

import numpy as np

from decentral.redundancy.giver import GivenState
from decentral.redundancy.labels import CHUNK_NBYTES
from tests.redundancy.swarm import Swarm

STATE = np.random.default_rng(0).bytes(5 * CHUNK_NBYTES + 77)


NEWER = np.random.default_rng(1).bytes(5 * CHUNK_NBYTES + 77)


async def give(swarm: Swarm, state: bytes = STATE, round_: int = 7) -> GivenState:
    given = await swarm.giver().give(state, round_)
    assert given is not None
    return given
