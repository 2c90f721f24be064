"""A fragment's pseudo-gradient to the bytes of a frame's body, and back.

What crosses the wire is the compressor's parts, tensor after tensor; what it costs is ``body_nbytes``. Sparse
methods see every parameter in its own shape (tiles need it); a reduce sees flat ranges, so that it can be cut
anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decentral.compressors import Compressor, compress_with_debt
from decentral.parameters import Fragment, split
from decentral.wire import body

# Shape suffixes: N = elements of the fragment or range, flat float32.

Shapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Encoded:
    """The bytes to send, and the debt to book if, and only if, a commit names them."""

    body: bytes
    debt_N: Tensor | None


@dataclass(frozen=True, slots=True)
class Codec:
    """A compressor with its error feedback, applied to fragments."""

    compressor: Compressor
    error_feedback: float | None  # decay of the debt, or None: what compression loses is gone

    def body_nbytes(self, shapes: Shapes) -> int:
        """Exact size of a body over ``shapes``: known before a byte arrives."""
        return body.nbytes(self.compressor, shapes)

    def encode(self, gradient_N: Tensor, debt_N: Tensor | None, shapes: Shapes) -> Encoded:
        """Compress ``error_feedback * debt + gradient``. Pure: the debt given is not changed.

        Raises NonFiniteError when the gradient holds NaN or Inf.
        """
        beta = 0.0 if self.error_feedback is None else self.error_feedback
        debts = [None] * len(shapes) if debt_N is None else split_shapes(debt_N, shapes)
        payloads, left = [], []
        for tensor, debt in zip(split_shapes(gradient_N, shapes), debts, strict=True):
            payload, after = compress_with_debt(self.compressor, tensor, debt, beta)
            payloads.append(payload)
            left.append(after.reshape(-1))
        debt_after = None if self.error_feedback is None else torch.cat(left)
        return Encoded(body.encode(self.compressor, payloads), debt_after)

    def decode(self, data: bytes | memoryview, shapes: Shapes) -> Tensor:
        """The flat float32 tensor that every receiver of ``data`` applies. Raises PayloadError."""
        tensors = body.decode(self.compressor, data, shapes)
        return torch.cat([tensor.reshape(-1) for tensor in tensors])


def split_shapes(flat_N: Tensor, shapes: Shapes) -> list[Tensor]:
    """Views of the flat tensor in the given shapes, in order."""
    return split(flat_N, shapes)


def fragment_shapes(fragment: Fragment) -> Shapes:
    """The shapes of a fragment's parameters, as sparse methods see them."""
    return fragment.shapes


def range_shapes(start: int, stop: int) -> Shapes:
    """A flat range, as a reduce sees it."""
    return ((stop - start,),)


def numel(shapes: Shapes) -> int:
    """Elements over all shapes."""
    return sum(math.prod(shape) for shape in shapes)
