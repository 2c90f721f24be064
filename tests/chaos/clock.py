"""A wall clock that can be stepped, in this process only; the monotonic clock stays as it is.

Install it before anything else is imported: whoever took ``time.time`` by reference keeps the true one.
"""

from __future__ import annotations

import time

_true = time.time
_offset = 0.0


def install() -> None:
    """Let ``time.time`` go through here from now on."""
    time.time = _stepped


def step(seconds: float) -> None:
    """What a bad time server does: from now on it is ``seconds`` later (or earlier)."""
    global _offset
    _offset += seconds


def _stepped() -> float:
    return _true() + _offset
