"""What a compressor is: tensor -> parts -> tensor, with every size known from the tensor's shape alone.

A part is a flat, packed tensor that goes to the wire as its little-endian bytes. Nothing about a part's size is
ever read from a peer: ``layout`` gives it. Compressors are pure values (frozen dataclasses): equal spelling,
equal compressor, equal bits. ``sparsifier >> quantiser`` makes a `Chain`.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from decentral.errors import ConfigError, NonFiniteError, PayloadError

if TYPE_CHECKING:
    from decentral.compressors.chain import Chain

__all__ = ["About", "Compressor", "Method", "PartSpec", "Payload", "Sparsifier", "check_input", "check_parts"]

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PartSpec:
    """One part's dtype and shape."""

    dtype: torch.dtype
    shape: Shape

    @property
    def nbytes(self) -> int:
        """Exact bytes on the wire."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Payload:
    """A compressed tensor: the shape it had, and its parts. The shape is local knowledge and is not sent."""

    shape: Shape
    parts: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Exact bytes of all parts."""
        return sum(part.numel() * part.element_size() for part in self.parts)


@runtime_checkable
class Compressor(Protocol):
    """Anything that turns float32 tensors into parts and back; ``str()`` is its canonical spelling."""

    def layout(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Every part's dtype and shape, for a tensor of this shape."""

    def compress(self, tensor: Tensor) -> Payload:
        """Parts of a finite float32 tensor, on its device; NonFiniteError on NaN or Inf."""

    def decompress(self, payload: Payload) -> Tensor:
        """A finite float32 tensor of ``payload.shape``; PayloadError when a part breaks a rule."""


@runtime_checkable
class Sparsifier(Protocol):
    """A compressor that keeps some entries exactly, so that another may quantise their values."""

    def index_layout(self, shape: Shape) -> tuple[PartSpec, ...]:
        """The parts that say which entries are kept."""

    def value_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        """The matrices of kept values, (chunks, entries kept per chunk) each."""

    def select(self, tensor: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The index parts, and the matrices of kept values."""

    def place(self, shape: Shape, index: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> Tensor:
        """The dense tensor: given values at the kept places, zero elsewhere; PayloadError on a bad index."""


@dataclass(frozen=True, slots=True)
class About:
    """What ``decentral compressors`` prints about a method."""

    layout: str  # the parts in words
    biased: bool  # without error feedback, what it drops is gone for good
    source: str  # authors, title, year, arXiv


class Method:
    """What every method of this package shares: its spelling, and ``>>``."""

    __slots__ = ()
    name: ClassVar[str]
    about: ClassVar[About]

    def __str__(self) -> str:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]  # every Method is a dataclass
        words = ", ".join(f"{field.name}={getattr(self, field.name)}" for field in fields)
        return f"{self.name}({words})" if words else self.name

    def __rshift__(self, quantiser: Compressor) -> "Chain":
        from decentral.compressors.chain import Chain  # Chain is itself a Method

        return Chain(self, quantiser)  # type: ignore[arg-type]  # Chain refuses what is no sparsifier


def check_input(tensor: Tensor) -> Tensor:
    """The tensor without its graph, once it is known to be float32 and finite. One pass, one device sync."""
    if tensor.dtype != torch.float32:
        raise ConfigError(f"compress: float32 is wanted, got {tensor.dtype}; call .float() first")
    tensor = tensor.detach()
    if tensor.numel():
        low, high = torch.aminmax(tensor)  # NaN propagates through both
        if not bool(torch.isfinite(low) & torch.isfinite(high)):
            raise NonFiniteError(
                f"compress: NaN or Inf in a tensor of shape {tuple(tensor.shape)}; nothing was sent, "
                "lower the learning rate or clip the gradients"
            )
    return tensor


def check_parts(method: object, payload: Payload, layout: tuple[PartSpec, ...]) -> None:
    """PayloadError unless the parts have exactly the dtypes and shapes of the layout, on one device."""
    found = [(part.dtype, tuple(part.shape)) for part in payload.parts]
    wanted = [(spec.dtype, spec.shape) for spec in layout]
    if found != wanted:
        raise PayloadError(f"{method} for shape {payload.shape}: parts {wanted} are wanted, got {found}; drop them")
    if len({part.device for part in payload.parts}) > 1:
        raise PayloadError(f"{method} for shape {payload.shape}: parts lie on several devices; move them to one")


def require(rule_holds: Tensor, method: object, rule: str) -> None:
    """PayloadError naming the rule, unless it holds. One device sync."""
    if not bool(rule_holds):
        raise PayloadError(f"{method}: {rule}; drop the message and its sender")
