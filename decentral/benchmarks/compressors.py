"""Bytes, speed, memory and error of every contestant on the same tensors, side by side in one run.

Repeats are interleaved (all contestants once, then all again): a neighbour that takes the processor for a while takes
it from everybody. The best time of each counts.
"""

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decentral.benchmarks.contestants import Contestant

__all__ = ["BenchRow", "measure", "peak_extra_bytes"]

Shapes = Sequence[tuple[int, ...]]


@dataclass(slots=True)
class BenchRow:
    """The figures of one method; None where a figure has no meaning or the method failed."""

    method: str
    data: str
    bits_per_value: float | None = None
    bits_per_kept: float | None = None  # of the values that arrive as something else than zero
    entropy_bound_bits: float | None = None  # per value
    encode_MBps: float | None = None  # dense float32 bytes per second, 10**6
    decode_MBps: float | None = None  # decoding and adding to an accumulator
    peak_extra_bytes: int | None = None  # of encoding
    peak_extra_share: float | None = None  # of the dense float32 bytes
    relative_error: float | None = None  # norm of what is lost / norm of what was given
    relative_error_kept: float | None = None  # the same over the values that arrive as something else than zero
    failed: str | None = None

    def as_json(self) -> dict[str, Any]:
        """For ``json.dumps``."""
        return asdict(self)


def measure(
    contestants: Sequence[Contestant],
    data: str,
    tensor_N: Tensor,
    shapes: Shapes,
    *,
    repeats: int,
    on_done: Callable[[], None] = lambda: None,
) -> list[BenchRow]:
    """Measure each contestant, a row each; ``on_done`` is called after each of ``repeats + 1`` turns of each."""
    rows = [BenchRow(contestant.name, data) for contestant in contestants]
    debt_N = torch.zeros_like(tensor_N)
    for repeat in range(repeats + 1):
        for contestant, row in zip(contestants, rows, strict=True):
            if row.failed is None:
                _once(contestant, row, tensor_N, debt_N, shapes, first=repeat == 0)
            on_done()
    return rows


def _once(
    contestant: Contestant, row: BenchRow, tensor_N: Tensor, debt_N: Tensor, shapes: Shapes, *, first: bool
) -> None:
    """The first time compiles, and measures what does not depend on time."""
    total_N = torch.zeros_like(tensor_N)
    try:
        seconds, sent = _time(lambda: contestant.encode(tensor_N, debt_N, shapes))
        decoding, _ = _time(lambda: contestant.add_to(total_N, sent, shapes))
        if first:
            _judge(contestant, row, sent, tensor_N, total_N, shapes)
            row.peak_extra_bytes = peak_extra_bytes(lambda: contestant.encode(tensor_N, debt_N, shapes))
            row.peak_extra_share = _share(row.peak_extra_bytes, 4 * tensor_N.numel())
            return
    except (TypeError, ValueError, RuntimeError, ImportError) as error:  # hivemind 1.1.12 fails on numpy 2.4
        row.failed = f"{type(error).__name__}: {error}".splitlines()[0]
        return
    megabytes = 4 * tensor_N.numel() / 1e6
    row.encode_MBps = max(row.encode_MBps or 0.0, megabytes / seconds)
    row.decode_MBps = max(row.decode_MBps or 0.0, megabytes / decoding)


def _judge(contestant: Contestant, row: BenchRow, sent: Any, tensor_N: Tensor, found_N: Tensor, shapes: Shapes) -> None:
    bits, kept_N = 8 * contestant.nbytes(sent), found_N != 0
    row.bits_per_value = bits / tensor_N.numel()
    row.bits_per_kept = bits / max(1, int(kept_N.sum()))
    bound = contestant.entropy_bound_bits(sent, shapes)
    row.entropy_bound_bits = None if bound is None else bound / tensor_N.numel()
    row.relative_error = float((found_N - tensor_N).norm() / tensor_N.norm())
    row.relative_error_kept = float((found_N - tensor_N)[kept_N].norm() / tensor_N[kept_N].norm())


def _time(call: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


def _share(part: int | None, whole: int) -> float | None:
    return None if part is None else part / whole


# ---- the most memory of a call ----
#
# It is counted beyond what the process had before the call.

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
