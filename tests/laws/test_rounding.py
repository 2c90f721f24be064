"""How a model rounds what is written to it is no progress: of every method, whoever trains and while nobody does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from decentral.optimizers import OuterMethod
from decentral.simulate.training import FlatModel
from decentral.training.live_side import LiveSide
from tests.kit.learners import SCHEMA, Learners
from tests.kit.replicas import NUMEL, SIGNERS
from tests.kit.tables import method_of

# Shape suffix: N = elements of the one fragment, flat float32.

pytestmark = pytest.mark.one_of_each
ALL = (0, 1, 2)
BY_SIGN = ("demo_sgd",)  # the last bit of a float32 near zero is a whole step; its spelling with a mean is held to this
TRAINED = 4  # rounds in which all train; then some in which nobody does


class Halves(FlatModel):
    """Live parameters in bfloat16."""

    def write(self, fragment: int, flat_N: Tensor) -> None:
        self.fragments[fragment] = flat_N.to(torch.bfloat16).float()

    def keeps(self, fragment: int) -> bool:
        return False

    def in_place(self, fragment: int) -> None:
        return None


def randn(seed: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


class Run(Learners):
    """Exact codecs; ``kind``: of the live parameters."""

    def __init__(self, outer: OuterMethod, kind: type[FlatModel]) -> None:
        super().__init__(outer, len(ALL), randn(0))
        for n, peer in enumerate(self.peers):
            peer.model = kind([self.start_N])
            peer.schedule.set_live(LiveSide(peer.model, peer.inner, SIGNERS[n].peer, SCHEMA))
            peer.schedule.put(peer.model, 0, self.start_N)  # which bfloat16 cannot hold

    def moved(self, n: int, step_N: Tensor, as_far_N: Tensor | None = None) -> Tensor:
        """One inner step, of ``step_N`` or ``as_far_N``; how far the live parameters went."""
        peer = self.peers[n]
        before_N = peer.live_N
        (taken_N,) = peer.inner.step([-step_N], peer.schedule.calls.before_step)
        peer.model.write(0, before_N - taken_N if as_far_N is None else before_N + as_far_N)
        peer.schedule.stepped()
        return peer.live_N - before_N


def drift(outer: OuterMethod, still: int) -> float:
    """How far two runs part whose live parameters make the same moves, in bfloat16 and in float32."""
    halves, floats = Run(outer, Halves), Run(outer, FlatModel)
    for number in range(TRAINED + still):
        for n in ALL:
            step_N = 0.01 * randn(10 * number + n) if number < TRAINED else torch.zeros(NUMEL)
            floats.moved(n, step_N, as_far_N=halves.moved(n, step_N))
        for run in (halves, floats):
            run.meet(ALL)
    pairs = zip(halves.peers, floats.peers, strict=True)
    return max(float((one.anchor_N - other.anchor_N).abs().max()) for one, other in pairs)


@pytest.mark.methods(lambda spelling: spelling not in BY_SIGN)
@pytest.mark.parametrize("still", [8, pytest.param(80, marks=pytest.mark.long)])
def test_what_a_model_in_bfloat16_rounds_is_in_no_anchor(outer: OuterMethod, still: int):
    assert drift(outer, still) < 1e-5


@pytest.mark.parametrize("name", ["diloco", "sparseloco", "noloco", "streaming"])
def test_the_law_catches_progress_that_is_measured_from_the_anchor(name: str, monkeypatch: pytest.MonkeyPatch):
    for module in ("schedule", "progress"):
        monkeypatch.setattr(f"decentral.training.{module}.as_written", lambda anchor_N, rounding_N: anchor_N)
    assert drift(method_of(name), 8) > 1e-4
