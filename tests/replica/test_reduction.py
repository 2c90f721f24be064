"""An owner's result beside what this peer sent of the same range: a mean is no longer than what it is of."""

from __future__ import annotations

import pytest
import torch

from decentral.replica.reduction import LONGEST, is_overlong
from decentral.wire.keys import Signer
from decentral.wire.messages import FrameRef

ME, *OTHERS = (Signer(bytes([n + 1] * 32)).peer for n in range(5))
SENT = torch.randn(5, 500, generator=torch.Generator().manual_seed(0))


def contributors(mine: int = 30, theirs: int = 30) -> list[FrameRef]:
    return [FrameRef(ME, ME, 0, mine, 1), *(FrameRef(peer, peer, 0, theirs, 1) for peer in OTHERS)]


@pytest.mark.parametrize("seed", range(5))
def test_no_mean_of_honest_changes_is_overlong(seed: int) -> None:
    generator, lengths_K1 = torch.Generator().manual_seed(seed), torch.tensor([[0.5], [1], [1], [2], [3]])
    sent = torch.randn(5, 500, generator=generator) * lengths_K1
    alike = sent[:1] * torch.tensor([[1.0], [1.0], [2.0], [2.0], [3.0]])  # and of changes that all point one way
    assert not is_overlong(sent.mean(0), sent[0], contributors(), ME)
    assert not is_overlong(alike.mean(0), alike[0], contributors(), ME)


@pytest.mark.parametrize("times", [10.0, 1e3, 1e30])
def test_a_result_far_longer_than_what_was_sent_is_overlong_whatever_steps_one_claims(times: float) -> None:
    lie_N = times * SENT[0]
    assert is_overlong(lie_N, SENT[0], contributors(), ME)
    claimed = [*contributors()[:4], FrameRef(OTHERS[3], OTHERS[3], 0, 2**32 - 1, 1)]
    assert is_overlong(lie_N, SENT[0], claimed, ME)
    assert not is_overlong(0.99 * LONGEST * SENT[0], SENT[0], contributors(), ME)


def test_a_peer_that_made_few_steps_expects_what_others_made_of_many() -> None:
    short_N = SENT[0] / 30
    assert not is_overlong(SENT[0], short_N, contributors(mine=1), ME)
    assert is_overlong(SENT[0], short_N, contributors(), ME)


def test_who_sent_nothing_of_a_range_cannot_tell() -> None:
    lie_N = torch.full((500,), 1e30)
    assert not is_overlong(lie_N, torch.zeros(500), contributors(), ME)
    assert not is_overlong(lie_N, SENT[0], contributors()[1:], ME)
