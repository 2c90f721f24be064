"""Elementwise work on a CUDA device as one kernel instead of one for each operation, each of which goes through memory.

The same function is what runs everywhere else: on the processor, on short tensors, where there is no compiler for the
device, and where the compiler fails. A compiled quotient may differ from the plain one in its last bit.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

__all__ = ["fuses", "one_kernel", "tried"]

P = ParamSpec("P")
R = TypeVar("R")
Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]  # Any: functions of tensors

_WORTH_IT = 1 << 20  # elements: below, being told takes longer than the work
_failed: set[str] = set()  # functions that the compiler could not take; told once


def fuses(device: torch.device) -> bool:
    """Whether there is a compiler for this device."""
    return device.type == "cuda" and _has_compiler()


def one_kernel(function: Callable[P, R]) -> Callable[P, R]:
    """A function of tensors, the first of which decides where it runs, and of numbers; compiled when first asked."""

    @functools.wraps(function)
    def called(*given: P.args, **named: P.kwargs) -> R:
        first = given[0]
        if not isinstance(first, Tensor) or first.numel() < _WORTH_IT or not fuses(first.device):
            return function(*given, **named)
        return tried(function, _compile, given, named)

    return called


def tried(function: Callable[..., R], compiler: Compiler, given: tuple[Any, ...], named: dict[str, Any]) -> R:
    """What the function gives, as ``compiler`` makes it, or as it is where that fails."""
    name = function.__qualname__
    if name in _failed:
        return function(*given, **named)
    try:
        for one in given:
            if isinstance(one, Tensor) and one.dim():
                torch._dynamo.maybe_mark_dynamic(one, 0)  # a model has tensors of many lengths: one kernel for all
        with torch.no_grad():
            return cast(R, _compiled(function, compiler)(*given, **named))
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a compiler stumbles over, the plain function does the same
        _failed.add(name)
        logging.getLogger(__name__).warning(
            "%s goes uncompiled on this device: %s", name, str(error).partition("\n")[0]
        )
        return function(*given, **named)


def _compile(function: Callable[..., R]) -> Callable[..., R]:
    """For each set of numbers anew, and of lengths but the first: a kernel that knows that of a block reads it once."""
    return torch.compile(function, dynamic=False)  # but for lengths of tensors, which are marked


@functools.cache
def _compiled(function: Callable[..., R], compiler: Compiler) -> Callable[..., R]:
    return compiler(function)


@functools.cache
def _has_compiler() -> bool:
    return importlib.util.find_spec("triton") is not None
