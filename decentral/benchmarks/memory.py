"""The most memory that a call took beyond what the process had before it."""

import ctypes
from collections.abc import Callable
from pathlib import Path

__all__ = ["peak_extra_bytes"]

_STATUS = Path("/proc/self/status")
_FORGET_PEAK = "5"  # proc(5): resets VmHWM to the present size


def peak_extra_bytes(call: Callable[[], object]) -> int | None:
    """Growth of the resident set at its highest while ``call`` ran, its result included; None where Linux does not
    count it.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)  # memory freed earlier would hide what is taken now
        Path("/proc/self/clear_refs").write_text(_FORGET_PEAK, encoding="ascii")
    except (OSError, AttributeError, TypeError):
        return None
    before = _kilobytes("VmRSS")
    result = call()
    highest = _kilobytes("VmHWM")
    del result
    return max(0, highest - before) * 1024


def _kilobytes(name: str) -> int:
    lines = _STATUS.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
