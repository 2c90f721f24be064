"""Answers of methods and rules, looked at before they are applied: how much each contribution counts, above all.

Shape suffixes: N = elements of one fragment, K = contributors; flat float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from decentral.errors import is_out_of_memory
from decentral.optimizers import Aggregation, Contributor
from decentral.optimizers.aggregation.base import Sent
from decentral.optimizers.base import MAX_SUMMARY_NBYTES
from decentral.tensors.memory import values_of
from decentral.tensors.ops import float32, is_finite
from decentral.wire.messages import FrameRef

__all__ = [
    "NOBODY",
    "OVERFLOW",
    "Unusable",
    "attempt",
    "call",
    "contributors_of",
    "make_step",
    "make_summary",
    "make_weights",
    "row_of",
    "scales_of",
]

# ---- what a method returned ----
#
# A plugin is anybody's code, a summary a peer's bytes.
#
# A commit is durable and binding when the method is asked. What cannot be used is therefore no error that ends a
# process, which would meet it again when it is restarted: nothing moves, on every peer alike, and all are told of the
# method.

T = TypeVar("T")

NOBODY = "every contributor counts nothing"
OVERFLOW = "the mean of the contributions is beyond float32"

_OF_ONE_MACHINE = (OSError, ImportError)  # a file or a package that is not there; out of memory, and of threads
_NO_THREAD = "can't start new thread"


class Unusable(ValueError):
    """An answer that cannot be used: nothing moves, on every peer alike, and this says why. It leaves no replica."""


def make_weights(make: Callable[[], Sequence[float]], count: int) -> tuple[list[float], str]:
    """Return the weights of ``count`` contributors, and why nothing moves where nobody counts: all are 0 unless each is
    a float32 from 0 on, and their sum, too.
    """
    given, why = call("weights", make)
    if why:
        return [0.0] * count, why
    found, error = attempt(lambda: _as_float32(given))
    if found is None:
        return [0.0] * count, f"weights gave no float32 numbers ({error})"
    if len(found) != count:
        return [0.0] * count, f"weights gave {len(found)} numbers for {count} contributors"
    if not all(weight >= 0 and math.isfinite(weight) for weight in found):
        return [0.0] * count, "weights gave numbers below 0, NaN or Inf"
    return found, "" if any(found) else NOBODY


def make_step(
    make: Callable[[], tuple[Tensor, Mapping[str, Tensor]]],
    before_N: Tensor,
    state: Mapping[str, Tensor],
    is_known: Callable[[Tensor], bool] = lambda made: False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the next anchor and state. Unusable unless they have the names, shapes and dtypes of those before, and are
    finite, which of some ``is_known``.
    """
    made, why = call("outer_step", make)
    why = why or _wrong_with(made, before_N, state, is_known)
    if made is None or why:
        raise Unusable(why)
    return values_of(made[0]), {name: values_of(tensor) for name, tensor in made[1].items()}


def make_summary(make: Callable[[], bytes]) -> tuple[bytes, str]:
    """Return what goes beside this peer's offer, and why that is nothing where what was made cannot go there."""
    made, why = call("summary", make)
    if why:
        return b"", why
    if not isinstance(made, bytes):
        return b"", f"summary gave {type(made).__name__}, want bytes"
    if len(made) > MAX_SUMMARY_NBYTES:
        return b"", f"summary gave {len(made)} bytes, {MAX_SUMMARY_NBYTES} at most go beside an offer"
    return made, ""


def call(name: str, make: Callable[[], T]) -> tuple[T | None, str]:
    """Return what was made, or why it was not."""
    made, error = attempt(make)
    return made, "" if error is None else f"{name} raised {type(error).__name__}: {error}"


def attempt(make: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return what was made, or the error that came of it on every peer alike. Raises one that is of this machine.

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


def _as_float32(given: Sequence[float] | None) -> list[float]:
    """As float32, and with a sum that is one. TypeError where there are none."""
    found = [float32(float(weight)) for weight in given]  # type: ignore[union-attr]  # TypeError is what None gives
    float32(math.fsum(found))
    return found


def _wrong_with(made: object, before_N: Tensor, state: Mapping[str, Tensor], is_known: Callable[[Tensor], bool]) -> str:
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], Mapping)):
        return "outer_step gave no pair of anchor and state"
    if set(made[1]) != set(state):
        return f"outer_step gave the state {sorted(map(str, made[1]))}, want {sorted(state)}"
    pairs = [("the anchor", made[0], before_N), *((name, made[1][name], old) for name, old in state.items())]
    return next((why for name, new, old in pairs if (why := _wrong_with_one(name, new, old, is_known))), "")


def _wrong_with_one(name: str, new: object, old: Tensor, is_known: Callable[[Tensor], bool]) -> str:
    if not isinstance(new, Tensor) or (new.shape, new.dtype, new.device) != (old.shape, old.dtype, old.device):
        what = f"{new.dtype} {tuple(new.shape)} on {new.device}" if isinstance(new, Tensor) else type(new).__name__
        return f"outer_step gave {what} for {name}, want {old.dtype} {tuple(old.shape)} on {old.device}"
    is_fine = is_known(new) or not torch.is_floating_point(new) or is_finite(new)
    return "" if is_fine else f"outer_step gave NaN or Inf for {name}"


# ---- what an aggregation rule returned ----
#
# A rule, too, is asked after the commit is durable, with numbers that peers chose. One of them must not end every
# process.


def scales_of(rule: Aggregation, sent: Sent) -> list[float]:
    """Return the scale of each contribution. Unusable unless each is a number, and within float32 times its weight.

    They are passed on as they are: their product with a weight is what is rounded.
    """
    given, why = call(f"{rule.name}: weigh", lambda: rule.weigh(sent))
    if why:
        raise Unusable(why)
    scales, error = attempt(lambda: _scales_and_products(given, sent))
    if scales is None:
        raise Unusable(f"{rule.name}: weigh gave no float32 for each of {len(sent)} contributors ({error})") from error
    found, counted = scales
    if not all(math.isfinite(number) for number in (*found, *counted)):
        raise Unusable(f"{rule.name}: weigh gave NaN or Inf")
    return found


def _scales_and_products(given: Sequence[float] | None, sent: Sent) -> tuple[list[float], list[float]]:
    """The scales, and their products with the weights as float32."""
    found = [float(scale) for scale in given]  # type: ignore[union-attr]  # TypeError is what None gives
    return found, [float32(weight * scale) for weight, scale in zip(sent.weight_K.tolist(), found, strict=True)]


def row_of(rule: Aggregation, row_KN: Tensor) -> Tensor:
    """The result (N,) of a rule by coordinates. Unusable unless it is one row of the same kind, and finite."""
    made, why = call(f"{rule.name}: combine", lambda: rule.combine(row_KN))
    if made is None or why:
        raise Unusable(why or f"{rule.name}: combine gave nothing")
    if not isinstance(made, Tensor) or (made.shape, made.dtype) != (row_KN.shape[1:], torch.float32):
        what = f"{made.dtype} {tuple(made.shape)}" if isinstance(made, Tensor) else type(made).__name__
        raise Unusable(f"{rule.name}: combine gave {what}, want float32 {tuple(row_KN.shape[1:])}")
    if not is_finite(made):
        raise Unusable(f"{rule.name}: combine gave NaN or Inf, as for values that sum beyond float32")
    return made


# ---- how much each contributor of a record counts ----
#
# The method is asked with what the record tells.


def contributors_of(
    contributors: Sequence[FrameRef],
    outer_step: int,
    num_fragments: int,
    norms: Sequence[float] | None = None,
    parts: Sequence[float] | None = None,
) -> list[Contributor]:
    """Give what a method may know of each; ``norms``: of their changes, where all peers measured them; ``parts``: of
    what an owner of a reduce has of them.
    """
    unknown: Sequence[float | None] = [None] * len(contributors)
    ages = [(outer_step - ref.based) // num_fragments for ref in contributors]
    return [
        Contributor(ref.peer, ref.tokens, ref.steps, age, ref.summary, norm, part)
        for ref, age, norm, part in zip(contributors, ages, norms or unknown, parts or unknown, strict=True)
    ]
