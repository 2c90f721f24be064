"""DES-LOC beside inner optimizers that have none of Adam's moments, or one of them."""

from __future__ import annotations

import pytest
import torch

from decentral.optimizers.shared_moments import DESLoc
from decentral.training.live_model import LiveModel
from decentral.training.live_side import Moments

BOTH = frozenset({"exp_avg", "exp_avg_sq"})


@pytest.mark.parametrize("make", [torch.optim.Adamax, torch.optim.SGD, torch.optim.AdamW])
def test_means_are_adopted_all_or_none(make: type[torch.optim.Optimizer]) -> None:
    """Adamax has a first moment only: it was put back to the last mean after every inner step until the next one."""
    model = torch.nn.Linear(3, 2)
    optimizer = make(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    live, means = Moments(LiveModel(model, 1, None), [optimizer]), {name: torch.full((8,), 5.0) for name in BOTH}
    before = live.read_moment("exp_avg", 0)
    is_adam = make is torch.optim.AdamW
    assert DESLoc().adopt(means, live, 0, BOTH) == is_adam
    after = live.read_moment("exp_avg", 0)
    if before is not None and after is not None:
        assert torch.equal(after, means["exp_avg"] if is_adam else before)
