"""EDiT's detector: what it takes for usual after the first norms."""

from __future__ import annotations

import struct

import torch

from decentral.optimizers import Contributor, RoundInfo
from decentral.optimizers.edit import EDiT


def told(*norms: float) -> list[Contributor]:
    return [Contributor(bytes([n]) * 32, summary=struct.pack("<d", norm)) for n, norm in enumerate(norms)]


def test_two_first_norms_that_are_nearly_equal_do_not_make_everything_usual():
    method, anchor = EDiT(warmup=6), torch.zeros(4)
    state = method.init(anchor)
    for _ in range(3):
        contributors = told(4.0, 4.01, 2.0)
        info = RoundInfo(0, tuple(contributors), tuple(method.weights(contributors, [1.0] * 3, state)))
        _, state = method.outer_step(anchor, {"change": torch.ones(4)}, state, info)
    weights = method.weights(told(4.0, 4.01, 40.0), [1.0] * 3, state)
    assert min(weights[:2]) > 0
    assert weights[2] == 0.0
