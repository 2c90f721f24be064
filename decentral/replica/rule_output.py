"""What an aggregation rule returned, looked at before any of it is added up: see `method_output`.

A rule is asked after the commit is durable, with numbers that peers chose. One of them must not end every process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from decentral.optimizers import Aggregation
from decentral.optimizers.aggregation.sent import Sent
from decentral.replica.method_output import attempted, called
from decentral.tensors.ops import float32, is_finite

# Shape suffixes: N = elements of one fragment, K = contributors; flat float32.

__all__ = ["Unusable", "row_of", "scales_of"]


class Unusable(ValueError):
    """What a rule gave cannot be used: nothing moves, on every peer alike, and this says why. It leaves no replica."""


def scales_of(rule: Aggregation, sent: Sent) -> list[float]:
    """What each contribution is multiplied by. Unusable unless each is a number, and within float32 times its weight.

    They are passed on as they are: their product with a weight is what is rounded.
    """
    given, why = called(f"{rule.name}: weigh", lambda: rule.weigh(sent))
    if why:
        raise Unusable(why)
    scales, error = attempted(lambda: _numbers(given, sent))
    if scales is None:
        raise Unusable(f"{rule.name}: weigh gave no float32 for each of {len(sent)} contributors ({error})") from error
    found, counted = scales
    if not all(math.isfinite(number) for number in (*found, *counted)):
        raise Unusable(f"{rule.name}: weigh gave NaN or Inf")
    return found


def _numbers(given: Sequence[float] | None, sent: Sent) -> tuple[list[float], list[float]]:
    """The scales, and their products with the weights as float32."""
    found = [float(scale) for scale in given]  # type: ignore[union-attr]  # TypeError is what None gives
    return found, [float32(weight * scale) for weight, scale in zip(sent.weight_K.tolist(), found, strict=True)]


def row_of(rule: Aggregation, row_KN: Tensor) -> Tensor:
    """The result (N,) of a rule by coordinates. Unusable unless it is one row of the same kind, and finite."""
    made, why = called(f"{rule.name}: combine", lambda: rule.combine(row_KN))
    if made is None or why:
        raise Unusable(why or f"{rule.name}: combine gave nothing")
    if not isinstance(made, Tensor) or (made.shape, made.dtype) != (row_KN.shape[1:], torch.float32):
        what = f"{made.dtype} {tuple(made.shape)}" if isinstance(made, Tensor) else type(made).__name__
        raise Unusable(f"{rule.name}: combine gave {what}, want float32 {tuple(row_KN.shape[1:])}")
    if not is_finite(made):
        raise Unusable(f"{rule.name}: combine gave NaN or Inf, as for values that sum beyond float32")
    return made
