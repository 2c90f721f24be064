"""What is sent is held until it is encoded, and made again for who asks after that."""

from __future__ import annotations

import torch
from torch import Tensor

from decentral.optimizers.sparseloco import SparseLoCo
from decentral.replica.contribution import Contribution
from decentral.replica.measures import Sample
from tests.laws.learners import Learners
from tests.laws.swarm import NUMEL

STEP = torch.linspace(-1, 1, NUMEL)


class Halved(SparseLoCo):
    """Sends half of its change."""

    __slots__ = ()

    def contribute(self, anchor_N: Tensor, local_N: Tensor) -> Tensor:
        return (anchor_N - local_N) * 0.5


def contribution_of(method: SparseLoCo) -> Contribution:
    run = Learners(method, 2, torch.full((NUMEL,), 3.0))
    run.learn({0: STEP, 1: STEP})
    peer = run.peers[0]
    made = peer.schedule.take(peer.model, 0, peer.anchor_N, b"", 1, outer_step=0)
    assert made is not None
    return made


def test_a_change_is_let_go_and_comes_back_bit_for_bit() -> None:
    made = contribution_of(SparseLoCo())
    before_N, sample = made.gradient_N.clone(), Sample(NUMEL)
    made.let_go()
    assert made.sent_N is None
    assert torch.equal(made.change_at(sample), sample.of(before_N))
    assert made.sent_N is None, "a look at a few places makes no vector"
    assert torch.equal(made.gradient_N, before_N)


def test_what_a_method_made_itself_is_kept() -> None:
    made = contribution_of(Halved())
    before_N = made.gradient_N.clone()
    made.let_go()
    assert torch.equal(made.gradient_N, before_N)
    assert torch.equal(made.change_at(Sample(NUMEL)), before_N)
