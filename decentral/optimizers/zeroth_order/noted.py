"""Derivatives that a peer measured and no commit took yet, in the state of its own that a checkpoint keeps.

``own``: "levels" a byte for each of them (S,) ; "next" seed and number of the direction after the last (2,), int64.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from decentral.optimizers.live import Derivative, Own
from decentral.optimizers.zeroth_order.directions import MOST_NUMBER
from decentral.optimizers.zeroth_order.told import MOST, ToldDerivatives

__all__ = ["keep_newer", "next_direction", "note", "noted"]

_NONE: Final = torch.zeros(0, dtype=torch.uint8)


def next_direction(own: Own, peer: bytes) -> tuple[int, int]:
    """Seed and number; those of gradients are numbered through a peer's life."""
    if "next" in own:
        seed, number = own["next"].tolist()
        return seed, number
    return int.from_bytes(hashlib.blake2b(peer, digest_size=8).digest(), "little") >> 1, 0  # 63 bits: int64 in ``own``


def note(own: Own, derivative: Derivative) -> None:
    """One more, and only the newest ``MOST``. Another seed, of another process, begins anew."""
    before = own.get("levels", _NONE)
    if "next" in own and own["next"].tolist() != [derivative.seed, derivative.number]:
        before = before[:0]
    own["levels"] = torch.cat([before, torch.tensor([derivative.byte], dtype=torch.uint8)])[-MOST:]
    own["next"] = torch.tensor([derivative.seed, derivative.number + 1 & MOST_NUMBER])


def keep_newer(own: Own, sent: Mapping[str, Tensor]) -> None:
    """Forget what was noted when ``own`` was as ``sent`` has it: a commit took that."""
    since = int(own["next"][1] - sent["next"][1]) & MOST_NUMBER
    levels = own.get("levels", _NONE)  # none where progress was given up since
    own["levels"] = levels[max(0, len(levels) - since) :]


def noted(own: Mapping[str, Tensor]) -> ToldDerivatives:
    """All of them."""
    levels = own.get("levels", _NONE)
    if not len(levels):
        return ToldDerivatives()
    seed, number = own["next"].tolist()
    return ToldDerivatives(seed, number - len(levels) & MOST_NUMBER, bytes(levels.tolist()))
