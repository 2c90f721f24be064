"""The contract of compressors, tensors -> parts -> tensors, with every size known from a tensor's shape alone.

A part is a tensor of codes, indices or floats, one element each; its kind says how it is packed or entropy coded on the
wire (`decentral.coding`). Nothing about a part's size is ever read from a peer: ``layout`` gives it, and bounds what
the coded part may take. Compressors are pure values (frozen dataclasses): equal spelling, equal compressor, equal bits.

Everybody, from the feedback to the receivers, calls ``compress`` and ``decompress`` with many tensors at once, and
there is no other way in. A method says one tensor (``compress_one``, ``decompress_one``) and `Method` loops, or it says
many where that is faster. ``sparsifier >> quantiser`` makes a `Chain`. The two here are the plainest: `Uncompressed`
and `Nothing`.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from decentral.coding import ElementKind, Floats, Symbols
from decentral.errors import ConfigError, NonFiniteError, PayloadError
from decentral.parameters import split
from decentral.tensors.device import PROCESSOR
from decentral.tensors.memory import fresh_like
from decentral.tensors.ops import is_finite, is_rising
from decentral.tensors.threads import elements_here, lumps, spread

__all__ = [
    "About",
    "AddBand",
    "Compressor",
    "Decoded",
    "Dense",
    "Method",
    "Nothing",
    "PartSpec",
    "Payload",
    "Scattered",
    "Selected",
    "Shape",
    "Shapes",
    "Sparsifier",
    "Spelled",
    "Uncompressed",
    "accumulate",
    "add_flat",
    "bits_per_value",
    "check_dtype",
    "check_input",
    "check_parts",
    "check_shapes",
    "compress_flat",
    "is_sparse",
    "needs_matrices",
    "no_sparsifier",
    "non_finite",
    "relative_error",
    "require",
    "require_rising",
]

# Shape suffixes: N = values of a tensor, or of several that lie one behind the other, n = of a run, S = places.

Shape = tuple[int, ...]
Shapes = Sequence[Shape]
_TAKEN = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class PartSpec:
    """The meaning, dtype and shape of a part. Parts of one name, over all tensors of a frame, are coded together."""

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


# ---- the contract ----


class Decoded:
    """A tensor as a receiver reads it. It can be added to a total without being made dense first."""

    __slots__ = ()

    @property
    def nbytes(self) -> int | None:
        """The memory that it holds beside its payload; None: there is no gain in keeping it, or nobody knows."""
        return None

    def tensor(self) -> Tensor:
        """Return the finite float32 tensor, new. PayloadError when a part breaks a rule."""
        raise NotImplementedError

    def add(self, start: int, total_n: Tensor, weight: float) -> None:
        """Do ``total += weight * tensor`` in place, bit for bit, over one run of the flattened tensor: ``total_n`` is
        contiguous and begins at ``start``. A run is a band of the compressor, or everything.

        PayloadError before anything is added.
        """
        raise NotImplementedError

    def support(self) -> tuple[Tensor, Tensor] | None:
        """Return distinct places int64 (S,) in the flattened tensor, in any order, and values float32 (S,) there, all
        others being zero; None where the parts do not name places.
        """
        return None


@runtime_checkable
class Compressor(Protocol):
    """Anything that turns float32 tensors into parts and back; ``str()`` is its canonical spelling."""

    def layout(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Return every part's dtype and shape, for a tensor of this shape."""

    def band(self, shape: Shape) -> int:
        """Return how many values of such a tensor are added at a time, but for the last run: as many as stay in the
        cache, or the whole tensor where payloads cannot be cut.
        """

    def compress(self, tensors: Sequence[Tensor]) -> list[Payload]:
        """Return the parts of each finite tensor of float32, bfloat16 or float16; NonFiniteError on NaN or Inf. All
        tensors are on one device, and the parts as well.
        """

    def decompress(self, payloads: Sequence[Payload]) -> list[Decoded]:
        """Return each payload as a receiver reads it. PayloadError when a part breaks a rule, now or at the first use
        of what is returned.
        """

    def compress_one(self, tensor: Tensor) -> Payload:
        """Return the parts of a tensor, as ``compress`` does."""

    def decompress_one(self, payload: Payload) -> Tensor:
        """Return the finite float32 tensor of a payload; PayloadError when a part breaks a rule."""


Selected = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]  # the index parts, and the matrices of kept values


@runtime_checkable
class Sparsifier(Protocol):
    """A compressor that keeps some entries exactly, so that another may quantise their values."""

    def index_layout(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Return the parts that say which entries are kept."""

    def value_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        """Return the shapes of the matrices of kept values, (chunks, entries kept per chunk) each."""

    def band(self, shape: Shape) -> int:
        """Return what `Compressor.band` does."""

    def select(self, tensors: Sequence[Tensor]) -> list[Selected]:
        """Return what is kept of each tensor."""

    def place(self, shapes: Shapes, selected: Sequence[Selected]) -> list[Decoded]:
        """Return tensors of these shapes that have such values at the kept places. PayloadError on a bad index."""


@dataclass(frozen=True, slots=True)
class About:
    """The lines that ``decentral compressors`` prints about a method."""

    layout: str  # the parts in words
    biased: bool  # without error feedback, what it drops is gone for good
    source: str  # authors, title, year, arXiv
    state: str = "none"  # what is kept from round to round; compressors are pure, feedback keeps
    # Of the Euclidean norms, unless it says per value; x is the tensor, or the group of values that it names. An added
    # power of two is for denormals. The laws hold it, to a millionth, on the edges of float32 too.
    bound: str = "|error| <= |tensor|"


class Spelled:
    """A method that has a name and a canonical spelling."""

    __slots__ = ()
    name: ClassVar[str]
    about: ClassVar[About]

    def __str__(self) -> str:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]  # every Method is a dataclass
        words = ", ".join(f"{field.name}={getattr(self, field.name)}" for field in fields)
        return f"{self.name}({words})" if words else self.name


class Method(Spelled):
    """A compressor that says ``layout`` and how to compress and decompress: one tensor (``compress_one``,
    ``decompress_one``), or many where one call for all is faster (``compress``, ``decompress``). The other of each pair
    follows here.
    """

    __slots__ = ()
    about: ClassVar[About] = About(layout="not described", biased=True, source="not described", bound="not described")

    def layout(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Return every part's dtype and shape, for a tensor of this shape."""
        raise NotImplementedError

    def band(self, shape: Shape) -> int:
        """Return the whole tensor's size: its payload cannot be cut."""
        return math.prod(shape)

    def compress(self, tensors: Sequence[Tensor]) -> list[Payload]:
        """Compress one after the other."""
        return [self.compress_one(tensor) for tensor in tensors]

    def decompress(self, payloads: Sequence[Payload]) -> list[Decoded]:
        """Return payloads that are decoded when they are used: dense tensors of many peers would not fit."""
        return [_Undecoded(self, payload) for payload in payloads]

    def compress_one(self, tensor: Tensor) -> Payload:
        """Return the parts of a finite tensor of float32, bfloat16 or float16; NonFiniteError on NaN or Inf."""
        (payload,) = self.compress([tensor])
        return payload

    def decompress_one(self, payload: Payload) -> Tensor:
        """Return the finite float32 tensor of a payload; PayloadError when a part breaks a rule."""
        (decoded,) = self.decompress([payload])
        return decoded.tensor()

    def __rshift__(self, quantiser: Compressor) -> Compressor:
        raise no_sparsifier(f"{self} >> {quantiser}")  # those that are sparsifiers make a chain: see SparsifierBase


AddBand = Callable[[int, Tensor, float], None]  # `Decoded.add`


@dataclass(frozen=True, slots=True)
class _Undecoded(Decoded):
    """A payload that becomes a dense tensor when it is used."""

    method: Method
    payload: Payload

    def tensor(self) -> Tensor:
        return self.method.decompress_one(self.payload)

    def add(self, start: int, total_n: Tensor, weight: float) -> None:
        _add_values(total_n, self.tensor(), weight)


@dataclass(frozen=True, slots=True)
class Dense(Decoded):
    """A tensor that is decoded and belongs to nobody else."""

    values: Tensor

    def tensor(self) -> Tensor:
        """Return it as it is."""
        return self.values

    def add(self, start: int, total_n: Tensor, weight: float) -> None:
        """Add all of it."""
        _add_values(total_n, self.values, weight)


def _add_values(total_N: Tensor, values: Tensor, weight: float) -> None:
    """Round twice, after the product and after the sum. Not add_(alpha=weight): that rounds once where the machine can,
    and replicas would differ.
    """
    values = values.reshape(-1)
    total_N += values if weight == 1 else values * weight


@dataclass(frozen=True, slots=True)
class Scattered(Decoded):
    """Values at distinct places of the flattened tensor, and zeros elsewhere."""

    shape: Shape
    place_S: Tensor  # int64
    value_S: Tensor  # float32

    @classmethod
    def nowhere(cls, payload: Payload) -> "Scattered":
        """Return zeros on the payload's device."""
        place_S = torch.zeros(0, dtype=torch.int64, device=payload.device)
        return cls(payload.shape, place_S, torch.zeros(0, dtype=torch.float32, device=payload.device))

    def tensor(self) -> Tensor:
        """Return zeros with the values in their places."""
        total_N = torch.zeros(math.prod(self.shape), dtype=torch.float32, device=self.value_S.device)
        self.add(0, total_N, 1.0)
        return total_N.view(self.shape)

    def add(self, start: int, total_n: Tensor, weight: float) -> None:
        """Touch the kept places only."""
        total_n[self.place_S] += self.value_S * weight

    def support(self) -> tuple[Tensor, Tensor]:
        """Return what it is made of."""
        return self.place_S, self.value_S

    @property
    def nbytes(self) -> int:
        """That of what it is made of."""
        return self.place_S.nbytes + self.value_S.nbytes


def accumulate(compressor: Compressor, total: Tensor, payload: Payload, weight: float = 1.0) -> None:
    """Do ``total += weight * compressor.decompress_one(payload)`` in place; ``total`` is of the payload's shape."""
    (decoded,) = compressor.decompress([payload])
    if total.is_contiguous():
        decoded.add(0, total.view(-1), weight)
    else:
        total += decoded.tensor() * weight


# ---- many tensors that lie one behind the other ----
#
# A model has hundreds of them. On the processor a few dozen calls to torch are little beside a lump of them, and lumps
# go to several threads; a device takes microseconds to be told of any operation, so it is told of all tensors at once.

_LEAST = 1 << 17  # values that are a job for a thread
_LUMP = 1 << 22  # values of tensors that are handled together: 83 of 31 million in 52 ms, 57 by halves


def compress_flat(compressor: Compressor, flat_N: Tensor, shapes: Shapes) -> tuple[Payload, ...]:
    """Return one payload per shape, on as many threads as torch may use."""
    tensors, numel = split(flat_N, shapes), elements_here(flat_N)
    if not numel:
        return tuple(compressor.compress(tensors))
    least = min(_LUMP, max(_LEAST, numel // (4 * torch.get_num_threads())))  # for each thread several jobs
    jobs = [tensors[lump] for lump in lumps([tensor.numel() for tensor in tensors], least)]
    return tuple(chain.from_iterable(spread(compressor.compress, jobs, numel)))


def add_flat(compressor: Compressor, total_N: Tensor, payloads: Sequence[Payload], weight: float = 1.0) -> None:
    """Do ``total += weight * what the payloads hold`` in place, bit for bit as one tensor after the other.

    PayloadError; some have been added then.
    """
    sizes = [math.prod(payload.shape) for payload in payloads]
    if not elements_here(total_N):
        _add_at_once(total_N, sizes, compressor.decompress(payloads), weight)
        return
    totals = torch.split_with_sizes(total_N, sizes)
    for lump in lumps(sizes, _LUMP):
        for total_n, decoded in zip(totals[lump], compressor.decompress(payloads[lump]), strict=True):
            decoded.add(0, total_n, weight)


def _add_at_once(total_N: Tensor, sizes: Sequence[int], decoded: Sequence[Decoded], weight: float) -> None:
    """Add in one operation where all payloads name their places."""
    found = [pair for one in decoded if (pair := one.support()) is not None]
    if not found or len(found) < len(decoded):
        for total_n, one in zip(torch.split_with_sizes(total_N, sizes), decoded, strict=True):
            one.add(0, total_n, weight)
        return
    counts = torch.tensor([len(place_S) for place_S, _ in found], dtype=torch.int64, device=total_N.device)
    size_M = torch.tensor(sizes, dtype=torch.int64, device=total_N.device)
    start_S = (size_M.cumsum(0) - size_M).repeat_interleave(counts, output_size=sum(len(one) for one, _ in found))
    place_S = torch.cat([place_S for place_S, _ in found]) + start_S
    total_N.index_add_(0, place_S, torch.cat([value_S for _, value_S in found]) * weight)


def no_sparsifier(chain: str) -> ConfigError:
    """Return the error for a chain that begins with a method that keeps no entries exactly."""
    return ConfigError(f"{chain}: the left side of >> must be a sparsifier; use topk(k=64, chunk=4096) there")


def check_dtype(tensor: Tensor) -> Tensor:
    """Return the tensor in float32 and without its graph; of a half type, the same values. ConfigError for any other
    type.
    """
    if tensor.dtype not in _TAKEN:
        raise ConfigError(f"compress: float32, bfloat16 or float16 is wanted, got {tensor.dtype}; call .float() first")
    return tensor.detach().float()


def check_input(tensor: Tensor) -> Tensor:
    """Return what ``check_dtype`` does, once it is known to be finite, too. One pass, one device sync."""
    tensor = check_dtype(tensor)
    if not is_finite(tensor):
        raise non_finite(tensor)
    return tensor


def non_finite(tensor: Tensor) -> NonFiniteError:
    """Return the error for a tensor that holds NaN or Inf."""
    return NonFiniteError(
        f"compress: NaN or Inf in a tensor of shape {tuple(tensor.shape)}; nothing was sent, "
        "lower the learning rate or clip the gradients"
    )


def check_parts(method: object, payload: Payload, layout: tuple[PartSpec, ...]) -> None:
    """Do what `check_shapes` does, and raise PayloadError where a code has more bits than its kind."""
    check_shapes(method, payload, layout)
    for part, spec in zip(payload.parts, layout, strict=True):
        if isinstance(spec.kind, Symbols) and spec.kind.bits < 8 and part.numel():
            require(part.amax() < 1 << spec.kind.bits, method, f"{spec.name} must be below {1 << spec.kind.bits}")


def check_shapes(method: object, payload: Payload, layout: tuple[PartSpec, ...]) -> None:
    """Raise PayloadError unless the parts have exactly the dtypes and shapes of the layout, on one device."""
    pairs = zip(payload.parts, layout, strict=False)
    fits = all(part.dtype == spec.dtype and part.shape == spec.shape for part, spec in pairs)
    if not fits or len(payload.parts) != len(layout):
        found = [(part.dtype, tuple(part.shape)) for part in payload.parts]
        wanted = [(spec.dtype, spec.shape) for spec in layout]
        raise PayloadError(f"{method} for shape {payload.shape}: parts {wanted} are wanted, got {found}; drop them")
    if len({part.device for part in payload.parts}) > 1:
        raise PayloadError(f"{method} for shape {payload.shape}: parts lie on several devices; move them to one")


def require_rising(index_Ck: Tensor, limit: int, method: object) -> None:
    """Raise PayloadError unless every row rises strictly within ``[0, limit)``.

    A peer chose these numbers. One bad index would write elsewhere, or on CUDA abort the whole process.
    """
    require(is_rising(index_Ck, limit), method, f"indices must rise strictly within [0, {limit})")


def require(rule_holds: Tensor | bool, method: object, rule: str) -> None:
    """Raise PayloadError naming the rule, unless it holds. At most one device sync."""
    if not bool(rule_holds):
        raise PayloadError(f"{method}: {rule}; drop the message and its sender")


# ---- traits of a compressor ----
#
# Measured on the compressor itself, so that they hold for those of other packages too.

_MATRIX = (1024, 1024)  # that traits are measured on


def bits_per_value(compressor: Compressor) -> float:
    """Return the most bits that each value of a matrix of a million takes, before entropy coding."""
    return 8 * sum(spec.nbytes for spec in compressor.layout(_MATRIX)) / math.prod(_MATRIX)


def needs_matrices(compressor: Compressor) -> bool:
    """Tell whether the same values take twice the bytes or more once they are flat: low rank takes 256 times."""
    matrix, flat = (sum(spec.nbytes for spec in compressor.layout(shape)) for shape in (_MATRIX, (math.prod(_MATRIX),)))
    return flat >= 2 * matrix


def is_sparse(compressor: Compressor) -> bool:
    """Tell whether most values arrive as zeros, so that the middle of what several peers sent is zero nearly
    everywhere.
    """
    arrived = compressor.decompress_one(compressor.compress_one(_gaussian()))
    return int((arrived == 0).sum()) > arrived.numel() // 2


def relative_error(compressor: Compressor) -> float:
    """Return what is lost of a Gaussian matrix, in norm, over the matrix: 0 is lossless, 1 sends nothing."""
    matrix = _gaussian()
    lost = matrix - compressor.decompress_one(compressor.compress_one(matrix))
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
        """Return one float32 part of N values."""
        return (PartSpec("values", torch.float32, (math.prod(shape),), Floats()),)

    def compress_one(self, tensor: Tensor) -> Payload:
        """Copy the values, so that a payload never changes under its reader."""
        values_N = check_input(tensor).flatten()
        return Payload(tuple(tensor.shape), (fresh_like(values_N).copy_(values_N),))

    def decompress(self, payloads: Sequence[Payload]) -> list[Decoded]:
        """Return the same bits in the same shape."""
        return [_Received(self, payload) for payload in payloads]


@dataclass(frozen=True, slots=True)
class _Received(Decoded):
    """The values in the payload itself, which are copied or added."""

    method: Uncompressed
    payload: Payload

    def tensor(self) -> Tensor:
        values = self._values()
        return fresh_like(values).copy_(values)

    def add(self, start: int, total_n: Tensor, weight: float) -> None:
        _add_values(total_n, self._values(), weight)

    def _values(self) -> Tensor:
        check_parts(self.method, self.payload, self.method.layout(self.payload.shape))
        require(is_finite(self.payload.parts[0]), self.method, "every value must be finite")
        return self.payload.parts[0].reshape(self.payload.shape)


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
        """Return no part."""
        return ()

    def compress_one(self, tensor: Tensor) -> Payload:
        """Refuse what is not finite, as every compressor does."""
        check_input(tensor)
        return Payload(tuple(tensor.shape), (), tensor.device)

    def decompress(self, payloads: Sequence[Payload]) -> list[Decoded]:
        """Return zeros."""
        for payload in payloads:
            check_parts(self, payload, ())
        return [Scattered.nowhere(payload) for payload in payloads]
