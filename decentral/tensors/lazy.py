"""Tensors whose values are made when somebody reads them, and never where somebody knows a way without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Lazy", "values_of"]


class Lazy(Tensor):
    """A tensor of any device: whatever torch does with it, it does with the values, which are made once."""

    _made: Tensor | None

    @staticmethod
    def __new__(cls, make: Callable[[], Tensor], *more: Any) -> Any:  # Any: mypy takes Tensor's for another signature
        """``make``: the values."""
        return torch.empty(0, dtype=torch.float32, device="meta").as_subclass(cls)  # without memory

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make, self._made = make, None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # Any: as torch's
        """Let torch have the values."""
        return func(*_with_values(args), **_with_values(kwargs or {}))

    def tensor(self) -> Tensor:
        """Return the values."""
        if self._made is None:
            self._made = self._make()
        return self._made

    @property
    def is_made(self) -> bool:
        """Whether somebody has read them; they may have been changed since."""
        return self._made is not None


def values_of(given: Tensor) -> Tensor:
    """Return the tensor, with its values if none are made yet."""
    return given.tensor() if isinstance(given, Lazy) else given


def _with_values(given: Any) -> Any:  # Any: arguments of a function of torch
    if isinstance(given, dict):
        return {name: _with_values(value) for name, value in given.items()}
    if type(given) in (tuple, list):
        return type(given)(map(_with_values, given))
    return values_of(given) if isinstance(given, Tensor) else given
