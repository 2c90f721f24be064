"""One peer's schedule beside a live model of eight parameters, and the commits of a swarm that a test plays."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from decentral.optimizers import OuterMethod
from decentral.optimizers.diloco import DiLoCo
from decentral.replica.contribution import Contribution
from decentral.rounds.local_state import CommittedUpdate
from decentral.training.live_model import LiveModel
from decentral.training.schedule import SyncSchedule
from decentral.wire.messages import FrameRef, Record

PEER = b"p" * 32
SEEN = bytes(32)
ZEROS = torch.zeros(8)


def record(*, frames: bool = True) -> Record:
    refs = (FrameRef(PEER, SEEN, 0, 1, 1),) if frames else ()
    return Record(SEEN, 0, 1, 0, 0, 0, SEEN, SEEN, (PEER,), refs, (), (), (PEER,), False)


def same(one: Tensor, other: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


class Scene:
    """The anchor is zero before each commit, and after it, where a test does not say otherwise."""

    def __init__(
        self, method: OuterMethod | None = None, *, interval: int = 4, overlap: int = 0, paced: int = 0, **given: Any
    ) -> None:
        torch.manual_seed(0)  # else what was drawn before decides how long an update is, and whether it counts
        self.model = LiveModel(torch.nn.Linear(3, 2), 1, None)
        self.pace = SyncSchedule(interval, overlap, method or DiLoCo(), SEEN, **given)
        self.pace.timing.paced = paced
        self.commits = 0

    @property
    def live_N(self) -> Tensor:
        return self.model.read(0)

    def learn(self, value: float) -> None:
        """Every parameter is this now."""
        self.model.write(0, torch.full((8,), value))

    def train(self, steps: int, seconds: float = 0.0) -> None:
        """As the outer loop: a step, and then its boundary."""
        for _ in range(steps):
            self.pace.stepped()
            self.pace.timing.seconds += seconds

    def take(self, tokens: int = 1, anchor_N: Tensor = ZEROS) -> Contribution | None:
        return self.pace.take(self.model, 0, anchor_N, SEEN, tokens, outer_step=0)

    def send(self, tokens: int = 1, anchor_N: Tensor = ZEROS) -> Contribution:
        made = self.take(tokens, anchor_N)
        assert made is not None
        return made

    def update(
        self, mine: Contribution | None, after_N: Tensor = ZEROS, before_N: Tensor = ZEROS, **told: Any
    ) -> CommittedUpdate:
        self.commits += 1
        return CommittedUpdate(record(), bytes([self.commits]) * 32, 0, before_N, after_N, mine, **told)

    def commit(self, mine: Contribution | None, after_N: Tensor = ZEROS, before_N: Tensor = ZEROS, **told: Any) -> bool:
        return self.pace.merge(self.update(mine, after_N, before_N, **told), self.model)
