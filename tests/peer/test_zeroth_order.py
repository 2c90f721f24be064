"""Just one byte in loops of one's own: by losses, by gradients, over a restart, and beside a method it does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decentral.errors import ConfigError, NonFiniteError
from decentral.manifest import Manifest
from decentral.optimizers.just_one_byte import ToldDerivatives
from decentral.peer import Peer
from decentral.training.inner_optimizers import SPSA
from tests.kit.problems import Problem, alone, run_terms

RATE, STEPS = 1e-4, 5


class Loop(Problem):
    """Losses of a peer's own data; ``directions``: their seed. None: it goes by gradients."""

    def __init__(self, directions: int | None) -> None:
        super().__init__(0)
        self.spoilt, self.optimizer = False, torch.optim.SGD(self.model.parameters(), lr=RATE)
        if directions is not None:
            self.optimizer = SPSA(self.model.named_parameters(), lr=RATE, seed=directions)

    def step(self) -> None:  # type: ignore[override]
        if not isinstance(self.optimizer, SPSA):
            super().step()
            return
        inputs = self.batch()
        self.optimizer.step(lambda: float(self.loss(inputs).detach()))

    def loss(self, inputs: Tensor) -> Tensor:
        return super().loss(inputs) * (float("nan") if self.spoilt else 1.0)


def terms(rounds: int, preset: str = "just_one_byte", **tables: dict[str, object]) -> Manifest:
    return run_terms(preset, run={"rounds": rounds}, inner={"steps": STEPS}, **tables)


def told(peer: Peer) -> ToldDerivatives:
    """What the peer would say now."""
    schedule = peer._part.loop.schedule  # type: ignore[union-attr]
    return ToldDerivatives.read(schedule.method.summary.says(schedule.live, 0, []))


def distance(loop: Loop) -> float:
    """Of the model, which is a sum of matrices, from what it shall learn."""
    return float((sum(p.detach() for p in loop.model.parameters()) - loop.goal).norm())


@pytest.mark.parametrize("seed", [7, None], ids=["by losses", "by gradients"])
def test_a_loop_tells_a_byte_a_step_and_its_rounds_learn(seed: int | None, tmp_path: Path):
    manifest, loop = terms(20, outer={"learning_rate": 2e-3}), Loop(seed)
    first = distance(loop)
    with alone(tmp_path, manifest, loop) as peer:
        for _ in range(STEPS - 1):
            loop.step()
        said = told(peer)
        assert len(said.levels) == STEPS - 1
        assert (said.seed == 7) == (seed is not None)
        while not peer.done:
            loop.step()
        assert told(peer).levels == b""
        assert torch.equal(loop.flat(), torch.cat(peer.anchor()))
    assert distance(loop) < first


def test_a_peer_that_is_restarted_between_two_rounds_goes_on_as_if_it_had_not_been(tmp_path: Path):
    manifest, whole, first, again = terms(3), Loop(7), Loop(7), Loop(8)
    with alone(tmp_path / "whole", manifest, whole) as peer:
        for _ in range(12):
            whole.step()
        wanted = told(peer)
    with alone(tmp_path / "cut", manifest, first):
        for _ in range(8):
            first.step()
    again.data.set_state(first.data.get_state())
    with alone(tmp_path / "cut", manifest, again) as peer:
        for _ in range(4):
            again.step()
        assert told(peer) == wanted
    assert (wanted.first, len(wanted.levels)) == (10, 2)
    assert torch.equal(again.flat(), whole.flat())


@pytest.mark.parametrize("on_nan", ["stop", "restart"])
def test_a_loss_that_is_no_number_is_handled_as_with_gradients(on_nan: str, tmp_path: Path):
    """It was told as a derivative of zero: the run went on, and nobody learnt of it."""
    loop, events = Loop(7), list[dict[str, Any]]()
    with alone(tmp_path, terms(6), loop, on_nan=on_nan, observer=events.append) as peer:
        loop.step()
        loop.spoilt = True
        if on_nan == "stop":
            for _ in range(STEPS - 2):
                loop.step()
            with pytest.raises(NonFiniteError, match="NaN or Inf in the pseudo-gradient of"):
                loop.step()
            return
        loop.step()
        loop.spoilt = False
        while not peer.done:
            loop.step()
        assert bool(torch.isfinite(loop.flat()).all())
    assert [event for event in events if event["event"] == "restarted"]


def test_losses_alone_are_refused_beside_a_method_that_goes_by_gradients(tmp_path: Path):
    loop = Loop(7)
    with (
        alone(tmp_path, terms(3, "scaffold"), loop),
        pytest.raises(ConfigError, match="SPSA makes no gradients, and the run's outer method goes by them"),
    ):
        loop.step()
