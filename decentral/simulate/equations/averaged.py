"""What the equations are made of: what each record of one fragment averaged, in order.

Shape suffixes in this room: N = elements of one fragment, which is one tensor, flat float64; K = contributors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from decentral.wire.messages import FrameRef

__all__ = ["Averaged", "Keys"]

Keys = Mapping[str, Any]  # Any: of [outer], numbers


@dataclass(frozen=True, slots=True)
class Averaged:
    """What one record says of a fragment."""

    mean_N: Tensor  # of the contributions, as frames or owners' results have it
    contributors: Sequence[FrameRef]
    rows_KN: Tensor = field(default_factory=lambda: torch.zeros(0))  # what each sent; of a reduce the mean, K times
    ages: Sequence[int] = ()  # outer steps of the fragment by which each is late
    name: str = ""  # of the fragment's tensor
