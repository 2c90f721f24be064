"""Commits as a peer's own counters hear of them, with nothing in them to merge."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def update(members: tuple[bytes, ...], contributed: bool, outer_step: int = 0) -> Any:
    """By these members, with a frame of somebody; ``contributed``: with ours."""
    frames = (SimpleNamespace(peer=bytes(32)),)
    where = {"round": 1, "epoch": 0, "outer_step": outer_step, "fragment": 0, "final": False, "hash": b""}
    record = SimpleNamespace(**where, frames=frames, contributors=(), members=members, next_members=())
    return SimpleNamespace(
        record=record, fragment=0, contribution=object() if contributed else None, anchor=b"", decision=None
    )
