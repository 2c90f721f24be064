"""A method whose contributions are made of summaries, and makes what nobody can use: nothing moves, and it is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decentral.optimizers import Contributor
from decentral.optimizers.base import CHANGE
from decentral.optimizers.just_one_byte import JustOneByte
from decentral.replica.apply import rebuilt
from decentral.replica.weights import Unusable

LAYOUT = {"a": (2, 3), "b": (4,)}
TOLD = [Contributor(bytes([n]) * 32, summary=bytes([n]) * 13) for n in range(2)]


class Bad(JustOneByte):
    def __init__(self, made: Any) -> None:
        super().__init__()
        object.__setattr__(self, "made", made)

    def rebuilt(self, told: Contributor, layout: Any) -> Any:
        return self.made(told)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda told: told.loss, "just_one_byte: rebuilt raised AttributeError"),
        (lambda told: torch.zeros(9), r"rebuilt gave torch.float32 \(9,\), want \(10,\)"),
        (lambda told: torch.zeros(10, dtype=torch.float64), "rebuilt gave torch.float64"),
        (lambda told: None, "just_one_byte: rebuilt gave nothing"),
    ],
    ids=["raises", "too short", "of another dtype", "nothing"],
)
def test_what_cannot_be_used_is_said(made: Any, why: str):
    with pytest.raises(Unusable, match=why):
        rebuilt(Bad(made), TOLD, LAYOUT, (1.0, 1.0), CHANGE)


def test_it_is_the_mean_by_weights_of_what_each_summary_says():
    method, each = JustOneByte(), [JustOneByte().rebuilt(one, LAYOUT) for one in TOLD]
    found = rebuilt(method, TOLD, LAYOUT, (1.0, 3.0), CHANGE)["change"]
    torch.testing.assert_close(found, (each[0] + 3 * each[1]) / 4)
    assert each[1].any()
