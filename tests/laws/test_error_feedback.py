"""Mass conservation: what was given was sent, or is owed, or waits for the round to be tried again."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from decentral.compressors import Compressor
from tests.kit.owing import compress_with_debt

FATES = ["commit", "abort", "commit", "commit", "abort", "abort", "abort", "commit", "commit", "abort", "commit"]
SHAPE = (67, 131)


class Ledger:
    """A sender as rounds/ drives it: an aborted round's pseudo-gradient is part of the next one's."""

    def __init__(self, shape: tuple[int, ...], device: str) -> None:
        self.given = torch.zeros(shape, dtype=torch.float64, device=device)
        self.sent = torch.zeros_like(self.given)
        self.pending = torch.zeros(shape, device=device)
        self.debt: Tensor | None = None

    def round(self, compressor: Compressor, new: Tensor, fate: str, beta: float = 1.0) -> None:
        self.given += new
        self.pending = self.pending + new
        payload, debt = compress_with_debt(compressor, self.pending, self.debt, beta)
        if fate == "commit":
            self.sent += compressor.decompress_one(payload)
            self.debt, self.pending = debt, torch.zeros_like(self.pending)

    @property
    def kept(self) -> Tensor:
        return self.pending.double() + (0 if self.debt is None else self.debt.double())


@pytest.fixture
def ledger(device: str) -> Ledger:
    return Ledger(SHAPE, device)


def test_nothing_is_lost_or_doubled_by_commits_and_aborts(
    compressor: Compressor, fine: bool, ledger: Ledger, integers: Callable[..., Tensor]
):
    for seed, fate in enumerate(FATES):
        ledger.round(compressor, integers(SHAPE, seed), fate)
        rounding = 2**-24 * 500 * (seed + 1) ** 2 if fine else 0  # of each sum so far, all rounds
        assert float((ledger.sent + ledger.kept - ledger.given).abs().max()) <= rounding, f"after round {seed}, {fate}"


def test_gaussian_mass_is_conserved_up_to_rounding(
    compressor: Compressor, ledger: Ledger, gaussian: Callable[..., Tensor]
):
    for seed, fate in enumerate(FATES):
        ledger.round(compressor, gaussian(SHAPE, seed), fate)
    torch.testing.assert_close(ledger.sent + ledger.kept, ledger.given, rtol=0, atol=1e-5)


def test_the_debt_stays_bounded(compressor: Compressor, ledger: Ledger, gaussian: Callable[..., Tensor]):
    """With k of n kept, the debt of a steady stream settles near n/k times one contribution; beta makes it less."""
    norms = []
    for seed in range(40):
        ledger.round(compressor, gaussian(SHAPE, seed), "commit", beta=0.95)
        norms.append(float(ledger.kept.norm()))
    assert max(norms[20:]) <= 20 * float(gaussian(SHAPE).norm())
