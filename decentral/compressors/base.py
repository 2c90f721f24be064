"""The protocol of compressors, tensor -> parts -> tensor, with every size known from the tensor's shape alone.

A part is a tensor of codes, indices or floats, one element each; its kind says how it is packed or entropy coded on the
wire (`decentral.coding`). Nothing about a part's size is ever read from a peer: ``layout`` gives it, and bounds what
the coded part may take. Compressors are pure values (frozen dataclasses): equal spelling, equal compressor, equal bits.
``sparsifier >> quantiser`` makes a `Chain`. The two here are the plainest: `Uncompressed` and `Nothing`.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from decentral.coding import ElementKind, Floats, Symbols
from decentral.errors import ConfigError, NonFiniteError, PayloadError
from decentral.tensors.device import PROCESSOR
from decentral.tensors.memory import fresh_like, fresh_zeros
from decentral.tensors.ops import is_finite, is_rising

__all__ = [
    "About",
    "Accumulator",
    "Compressor",
    "Method",
    "Nothing",
    "PartSpec",
    "Payload",
    "Shape",
    "Sparsifier",
    "Uncompressed",
    "accumulate",
    "bits_per_value",
    "check_dtype",
    "check_input",
    "check_parts",
    "check_shapes",
    "is_sparse",
    "needs_matrices",
    "no_sparsifier",
    "non_finite",
    "relative_error",
    "require",
    "require_rising",
]

Shape = tuple[int, ...]
_TAKEN = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class PartSpec:
    """One part's meaning, dtype and shape. Parts of one name, over all tensors of a frame, are coded together."""

    name: str
    dtype: torch.dtype
    shape: Shape
    kind: ElementKind

    @property
    def nbytes(self) -> int:
        """Bytes on the wire when entropy coding gains nothing, and the most it may take."""
        return self.kind.raw_nbytes(self.shape, self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class Payload:
    """A compressed tensor: the shape it had, and its parts. The shape is local knowledge and is not sent."""

    shape: Shape
    parts: tuple[Tensor, ...]
    without_parts: torch.device = PROCESSOR  # where it lies when nothing had to be sent

    @property
    def device(self) -> torch.device:
        """Where the parts lie."""
        return self.parts[0].device if self.parts else self.without_parts


@runtime_checkable
class Compressor(Protocol):
    """Anything that turns float32 tensors into parts and back; ``str()`` is its canonical spelling."""

    def layout(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Every part's dtype and shape, for a tensor of this shape."""

    def compress(self, tensor: Tensor) -> Payload:
        """Parts of a finite tensor of float32, bfloat16 or float16, on its device; NonFiniteError on NaN or Inf."""

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

    def add_at(self, total: Tensor, index: tuple[Tensor, ...], values: tuple[Tensor, ...], weight: float) -> None:
        """``total += weight * values`` at the kept places of a contiguous total, in place; PayloadError on a bad index,
        nothing added.
        """


@runtime_checkable
class Accumulator(Protocol):
    """A compressor that can add what it decodes without making the dense tensor first."""

    def accumulate(self, total: Tensor, payload: Payload, weight: float) -> None:
        """``total += weight * decompress(payload)``, bit for bit, in place; PayloadError before anything is added."""


def accumulate(compressor: Compressor, total: Tensor, payload: Payload, weight: float = 1.0) -> None:
    """``total += weight * compressor.decompress(payload)`` in place, by the compressor's own way if it has one."""
    own = getattr(compressor, "accumulate", None)  # isinstance(compressor, Accumulator) costs 40 microseconds
    if own is not None:
        own(total, payload, weight)
    elif weight == 1:
        total += compressor.decompress(payload)
    else:  # not add_(alpha=weight): that rounds once where the machine can, and replicas would differ
        total += compressor.decompress(payload) * weight


@dataclass(frozen=True, slots=True)
class About:
    """What ``decentral compressors`` prints about a method."""

    layout: str  # the parts in words
    biased: bool  # without error feedback, what it drops is gone for good
    source: str  # authors, title, year, arXiv
    state: str = "none"  # what is kept from round to round; compressors are pure, feedback keeps
    # Of the Euclidean norms, unless it says per value; x is the tensor, or the group of values that it names. An added
    # power of two is for denormals. The laws hold it, to a millionth, on the edges of float32 too.
    bound: str = "|error| <= |tensor|"


class Method:
    """What every method of this package shares: its spelling."""

    __slots__ = ()
    name: ClassVar[str]
    about: ClassVar[About]

    def __str__(self) -> str:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]  # every Method is a dataclass
        words = ", ".join(f"{field.name}={getattr(self, field.name)}" for field in fields)
        return f"{self.name}({words})" if words else self.name

    def __rshift__(self, quantiser: Compressor) -> Compressor:
        raise no_sparsifier(f"{self} >> {quantiser}")  # those that are sparsifiers make a chain: see SparsifierBase


def no_sparsifier(chain: str) -> ConfigError:
    """The error for a chain that begins with a method that keeps no entries exactly."""
    return ConfigError(f"{chain}: the left side of >> must be a sparsifier; use topk(k=64, chunk=4096) there")


def check_dtype(tensor: Tensor) -> Tensor:
    """The tensor in float32 and without its graph; of a half type, the same values. ConfigError for any other type."""
    if tensor.dtype not in _TAKEN:
        raise ConfigError(f"compress: float32, bfloat16 or float16 is wanted, got {tensor.dtype}; call .float() first")
    return tensor.detach().float()


def check_input(tensor: Tensor) -> Tensor:
    """As ``check_dtype``, once it is known to be finite, too. One pass, one device sync."""
    tensor = check_dtype(tensor)
    if not is_finite(tensor):
        raise non_finite(tensor)
    return tensor


def non_finite(tensor: Tensor) -> NonFiniteError:
    """The error for a tensor that holds NaN or Inf."""
    return NonFiniteError(
        f"compress: NaN or Inf in a tensor of shape {tuple(tensor.shape)}; nothing was sent, "
        "lower the learning rate or clip the gradients"
    )


def check_parts(method: object, payload: Payload, layout: tuple[PartSpec, ...]) -> None:
    """As `check_shapes`; and PayloadError unless codes of few bits have no more."""
    check_shapes(method, payload, layout)
    for part, spec in zip(payload.parts, layout, strict=True):
        if isinstance(spec.kind, Symbols) and spec.kind.bits < 8 and part.numel():
            require(part.amax() < 1 << spec.kind.bits, method, f"{spec.name} must be below {1 << spec.kind.bits}")


def check_shapes(method: object, payload: Payload, layout: tuple[PartSpec, ...]) -> None:
    """PayloadError unless the parts have exactly the dtypes and shapes of the layout, on one device."""
    found = [(part.dtype, tuple(part.shape)) for part in payload.parts]
    wanted = [(spec.dtype, spec.shape) for spec in layout]
    if found != wanted:
        raise PayloadError(f"{method} for shape {payload.shape}: parts {wanted} are wanted, got {found}; drop them")
    if len({part.device for part in payload.parts}) > 1:
        raise PayloadError(f"{method} for shape {payload.shape}: parts lie on several devices; move them to one")


def require_rising(index_Ck: Tensor, limit: int, method: object) -> None:
    """PayloadError unless every row rises strictly within ``[0, limit)``.

    A peer chose these numbers. One bad index would write elsewhere, or on CUDA abort the whole process.
    """
    require(is_rising(index_Ck, limit), method, f"indices must rise strictly within [0, {limit})")


def require(rule_holds: Tensor | bool, method: object, rule: str) -> None:
    """PayloadError naming the rule, unless it holds. At most one device sync."""
    if not bool(rule_holds):
        raise PayloadError(f"{method}: {rule}; drop the message and its sender")


# ---- traits of a compressor ----
#
# Measured on the compressor itself, so that they hold for those of other packages too.

_MATRIX = (1024, 1024)  # that traits are measured on


def bits_per_value(compressor: Compressor) -> float:
    """Bits that it takes of a matrix of a million values, each of them, before entropy coding: at most."""
    return 8 * sum(spec.nbytes for spec in compressor.layout(_MATRIX)) / math.prod(_MATRIX)


def needs_matrices(compressor: Compressor) -> bool:
    """Whether the same values take twice the bytes or more once they are a flat vector: low rank does, 256 times."""
    matrix, flat = (sum(spec.nbytes for spec in compressor.layout(shape)) for shape in (_MATRIX, (math.prod(_MATRIX),)))
    return flat >= 2 * matrix


def is_sparse(compressor: Compressor) -> bool:
    """Whether most values arrive as zeros, so that the middle of what several peers sent is zero nearly everywhere."""
    matrix = _gaussian()
    return int((compressor.decompress(compressor.compress(matrix)) == 0).sum()) > matrix.numel() // 2


def relative_error(compressor: Compressor) -> float:
    """The norm of what is lost of a Gaussian matrix over the norm of the matrix: 0 is lossless, 1 sends nothing."""
    matrix = _gaussian()
    lost = matrix - compressor.decompress(compressor.compress(matrix))
    return float(lost.norm() / matrix.norm())


def _gaussian() -> Tensor:
    drawn = torch.Generator().manual_seed(0)
    return torch.randn(_MATRIX, generator=drawn, dtype=torch.float32, device="cpu")


# ---- everything, as it is ----
#
# Parts: the values, float32 (N,). 32 bits per value, exact.


@dataclass(frozen=True, slots=True)
class Uncompressed(Method):
    """The identity: what DiLoCo's paper sends (Douillard et al., 2023, arXiv:2311.08105)."""

    name: ClassVar[str] = "none"
    about: ClassVar[About] = About(
        layout="values float32 (N)",
        biased=False,
        source='Douillard et al., "DiLoCo", 2023, arXiv:2311.08105',
        bound="error = 0",
    )

    def layout(self, shape: Shape) -> tuple[PartSpec, ...]:
        """One float32 part of N values."""
        return (PartSpec("values", torch.float32, (math.prod(shape),), Floats()),)

    def compress(self, tensor: Tensor) -> Payload:
        """A copy, so that a payload never changes under its reader."""
        values_N = check_input(tensor).flatten()
        return Payload(tuple(tensor.shape), (fresh_like(values_N).copy_(values_N),))

    def decompress(self, payload: Payload) -> Tensor:
        """The same bits in the same shape."""
        values = self._values(payload)
        return fresh_like(values).copy_(values)

    def accumulate(self, total: Tensor, payload: Payload, weight: float) -> None:
        """Straight from the payload."""
        values = self._values(payload)
        total += values if weight == 1 else values * weight

    def _values(self, payload: Payload) -> Tensor:
        check_parts(self, payload, self.layout(payload.shape))
        require(is_finite(payload.parts[0]), self, "every value must be finite")
        return payload.parts[0].reshape(payload.shape)


# ---- nothing at all ----
#
# For methods whose contributions are made of what peers say of them, see `Summary.rebuilt`.
#
# Parts: none. 0 bits per value. No spelling names it, as a run of any other method would stand still with it.


@dataclass(frozen=True, slots=True)
class Nothing(Method):
    """Everything arrives as zero."""

    name: ClassVar[str] = "nothing"
    about: ClassVar[About] = About(layout="nothing", biased=True, source="none")

    def layout(self, shape: Shape) -> tuple[PartSpec, ...]:
        """No part."""
        return ()

    def compress(self, tensor: Tensor) -> Payload:
        """What is not finite is refused, as by every compressor."""
        check_input(tensor)
        return Payload(tuple(tensor.shape), (), tensor.device)

    def decompress(self, payload: Payload) -> Tensor:
        """Zeros."""
        check_parts(self, payload, ())
        found = fresh_zeros(torch.Size(payload.shape).numel()).reshape(payload.shape)
        return found.to(payload.device)

    def accumulate(self, total: Tensor, payload: Payload, weight: float) -> None:
        """The total stays as it is."""
        check_parts(self, payload, ())
