"""MASHA: what moves, what is owed at both ends, and that nothing is lost between them."""

from __future__ import annotations

import torch
from torch import Tensor

from decentral.optimizers.masha import Masha
from decentral.optimizers.steps import draw_one_of_each
from tests.kit.replicas import NUMEL
from tests.kit.stepping import step

PEERS = (0, 1, 2)


def randn(seed: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def test_a_round_moves_the_largest_of_what_is_owed_by_all_of_it():
    method, anchor = Masha(parts=4, lr=0.5, keep=0.5), torch.zeros(8)
    first = torch.tensor([1.0, -8.0, 3.0, 2.0, 0.0, 7.0, -4.0, 0.5])
    after, state = step(method, anchor, first, method.init(anchor))
    assert after.tolist() == [0, 4, 0, 0, 0, -3.5, 0, 0]
    assert state["debt"].tolist() == [1, 0, 3, 2, 0, 0, -4, 0.5]
    after, state = step(method, after, torch.tensor([0.0, 0, 2, 0, 0, 0, 0, 0]), state, number=1)
    assert after.tolist() == [0, 4, -1.75, 0, 0, -3.5, 1, 0]  # 3/2 + 2 and -4/2
    assert state["debt"].tolist() == [0.5, 0, 0, 1, 0, 0, 0, 0.25]


def test_values_of_equal_size_move_together():
    """Which of them comes first depends on the machine."""
    method = Masha(parts=4)
    after, state = step(method, torch.zeros(8), torch.tensor([1.0, -1, 1, 1, 0, 0, 2, 0]), method.init(torch.zeros(8)))
    assert after.tolist() == [-1, 1, -1, -1, 0, 0, -2, 0]
    assert not state["debt"].any()


def test_what_is_drawn_moves_and_the_rest_waits():
    method, anchor, change = Masha(parts=5, choose="random"), randn(0), randn(1)
    after, state = step(method, anchor, change, method.init(anchor), number=7)
    drawn_N = draw_one_of_each(5, 7, NUMEL)
    assert torch.equal(after != anchor, drawn_N)
    assert torch.equal(state["debt"], torch.where(drawn_N, 0.0, change))


def test_no_more_values_move_however_many_peers_sent_others():
    method, anchor = Masha(parts=64), torch.zeros(64 * 64)
    sent = torch.zeros(64 * 64)
    sent[::4] = torch.randn(64 * 16, generator=torch.Generator().manual_seed(0))
    after, state = step(method, anchor, sent, method.init(anchor), peers=16)
    assert int((after != anchor).sum()) == 64
    assert int((state["debt"] != 0).sum()) == 64 * 15
