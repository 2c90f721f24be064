"""What a method returned, looked at before any of it is applied: a plugin is anybody's code, a summary a peer's bytes.

A commit is durable and binding when the method is asked. What cannot be used is therefore no error that ends a process,
which would meet it again when it is restarted: nothing moves, on every peer alike, and all are told of the method.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from decentral.errors import is_out_of_memory
from decentral.optimizers.base import MAX_SUMMARY_NBYTES
from decentral.tensors.ops import float32, is_finite

# Shape suffix: N = elements of one fragment, flat float32.

__all__ = ["NOBODY", "OVERFLOW", "Stepped", "Weighed", "attempted", "called", "said", "stepped", "weighed"]

T = TypeVar("T")

NOBODY = "every contributor counts nothing"
OVERFLOW = "the mean of the contributions is beyond float32"

_OF_ONE_MACHINE = (OSError, ImportError)  # a file or a package that is not there; out of memory, and of threads
_NO_THREAD = "can't start new thread"


@dataclass(frozen=True, slots=True)
class Weighed:
    """What each contributor counts, and why nothing moves where nobody counts."""

    weights: list[float]  # float32
    why: str = ""


@dataclass(frozen=True, slots=True)
class Stepped:
    """What an outer step gave, and why nothing moves where it cannot be used: then it is what was before."""

    after_N: Tensor
    state: dict[str, Tensor]
    why: str = ""


def weighed(make: Callable[[], Sequence[float]], count: int) -> Weighed:
    """The weights of ``count`` contributors; all 0 unless each is a float32 from 0 on, and their sum, too."""
    given, why = called("weights", make)
    if why:
        return Weighed([0.0] * count, why)
    found, error = attempted(lambda: _numbers(given))
    if found is None:
        return Weighed([0.0] * count, f"weights gave no float32 numbers ({error})")
    if len(found) != count:
        return Weighed([0.0] * count, f"weights gave {len(found)} numbers for {count} contributors")
    if not all(weight >= 0 and math.isfinite(weight) for weight in found):
        return Weighed([0.0] * count, "weights gave numbers below 0, NaN or Inf")
    return Weighed(found, "" if any(found) else NOBODY)


def stepped(
    make: Callable[[], tuple[Tensor, Mapping[str, Tensor]]], before_N: Tensor, state: Mapping[str, Tensor]
) -> Stepped:
    """The next anchor and state, of the same names, shapes and dtypes as before, and finite; else those before."""
    made, why = called("outer_step", make)
    why = why or _wrong_with(made, before_N, state)
    if made is None or why:
        return Stepped(before_N, dict(state), why)
    return Stepped(made[0], dict(made[1]))


def said(make: Callable[[], bytes]) -> tuple[bytes, str]:
    """What goes beside an offer of this peer's, and why that is nothing where what was made cannot go there."""
    made, why = called("summary", make)
    if why:
        return b"", why
    if not isinstance(made, bytes):
        return b"", f"summary gave {type(made).__name__}, want bytes"
    if len(made) > MAX_SUMMARY_NBYTES:
        return b"", f"summary gave {len(made)} bytes, {MAX_SUMMARY_NBYTES} at most go beside an offer"
    return made, ""


def called(name: str, make: Callable[[], T]) -> tuple[T | None, str]:
    """What was made, or why it was not."""
    made, error = attempted(make)
    return made, "" if error is None else f"{name} raised {type(error).__name__}: {error}"


def attempted(make: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What was made, or the error that came of it on every peer alike. One that is of this machine is raised.

    A method is a function of numbers that all peers have, so that its errors are, too, whatever their class: torch has
    RuntimeError for shapes that do not fit. A peer that ended here would meet the same again when it is restarted; one
    that went on although only its own memory was full would be the only one whose anchor has not moved.
    """
    try:
        return make(), None
    except Exception as error:
        if _is_of_one_machine(error):
            raise
        return None, error


def _is_of_one_machine(error: Exception) -> bool:
    return isinstance(error, _OF_ONE_MACHINE) or is_out_of_memory(error) or _NO_THREAD in str(error)


def _numbers(given: Sequence[float] | None) -> list[float]:
    """As float32, and with a sum that is one. TypeError where there are none."""
    found = [float32(float(weight)) for weight in given]  # type: ignore[union-attr]  # TypeError is what None gives
    float32(math.fsum(found))
    return found


def _wrong_with(made: object, before_N: Tensor, state: Mapping[str, Tensor]) -> str:
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], Mapping)):
        return "outer_step gave no pair of anchor and state"
    if set(made[1]) != set(state):
        return f"outer_step gave the state {sorted(map(str, made[1]))}, want {sorted(state)}"
    pairs = [("the anchor", made[0], before_N), *((name, made[1][name], old) for name, old in state.items())]
    return next((why for name, new, old in pairs if (why := _wrong_with_one(name, new, old))), "")


def _wrong_with_one(name: str, new: object, old: Tensor) -> str:
    if not isinstance(new, Tensor) or (new.shape, new.dtype, new.device) != (old.shape, old.dtype, old.device):
        what = f"{new.dtype} {tuple(new.shape)} on {new.device}" if isinstance(new, Tensor) else type(new).__name__
        return f"outer_step gave {what} for {name}, want {old.dtype} {tuple(old.shape)} on {old.device}"
    return f"outer_step gave NaN or Inf for {name}" if torch.is_floating_point(new) and not is_finite(new) else ""
