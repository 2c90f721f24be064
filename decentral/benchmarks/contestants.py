"""The contestants of the benchmark: ours as peers use it, the published SparseLoCo pipeline, hivemind's codecs, plain
zstd.

Each makes bytes of a flat float32 tensor of given shapes and reads them back into an accumulator.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import lgamma, log, prod
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from decentral import coding
from decentral.benchmarks.published import PublishedSparseLoCo
from decentral.compressors import Chain, Compressor, PartSpec, Payload, describe_compressors, parse_compressor
from decentral.compressors.feedback import ErrorFeedback, NoFeedback
from decentral.replica.codec import Codec, split_shapes
from decentral.transport.daemon.transport import quiet_hivemind
from decentral.wire import body
from decentral.wire.body import to_array
from decentral.wire.frames import FrameKind, Header, parse, seal
from decentral.wire.keys import Signer

__all__ = ["Contestant", "Ours", "information_bits", "others", "ours"]

Shapes = Sequence[tuple[int, ...]]

_CHAINS = (
    "topk(k=64, chunk=4096) >> signmag2",
    "topk(k=64, chunk=4096) >> int8",
    "topk(k=64, chunk=4096) >> bf16",
)
_DECAY = 0.95


class Contestant(Protocol):
    """A way to send a tensor."""

    @property
    def name(self) -> str:
        """As it is printed."""

    def encode(self, tensor_N: Tensor, debt_N: Tensor, shapes: Shapes) -> Any:
        """Return the payload; error feedback is computed and thrown away."""

    def nbytes(self, sent: Any) -> int:
        """Everything that crosses the wire."""

    def add_to(self, total_N: Tensor, sent: Any, shapes: Shapes) -> None:
        """Check what arrived, decode it and add it to ``total_N``."""

    def entropy_bound_bits(self, sent: Any, shapes: Shapes) -> float | None:
        """Information in all parts, in bits; None when nobody has said what they are."""


@dataclass(frozen=True, slots=True)
class Ours:
    """A method of this package as a signed frame: hash, signature and header included."""

    name: str
    codec: Codec
    signer: Signer

    def encode(self, tensor_N: Tensor, debt_N: Tensor, shapes: Shapes) -> bytes:
        """A frame, sealed."""
        encoded = self.codec.encode(tensor_N, {name: debt_N for name in self.codec.feedback.sender}, shapes)
        return seal(_header(self.signer.peer), encoded.body, self.signer).data

    def nbytes(self, sent: bytes) -> int:
        """Header and body."""
        return len(sent)

    def add_to(self, total_N: Tensor, sent: bytes, shapes: Shapes) -> None:
        """Hash, signature, then the body."""
        frame = parse(sent, lambda header: self.codec.max_body_nbytes(shapes))
        self.codec.add(total_N, self.codec.unpack(frame.body, shapes))

    def entropy_bound_bits(self, sent: bytes, shapes: Shapes) -> float:
        """By the statistics of this very frame."""
        frame = parse(sent, lambda header: self.codec.max_body_nbytes(shapes))
        return information_bits(self.codec.compressor, body.decode(self.codec.compressor, frame.body, shapes))


@dataclass(frozen=True, slots=True)
class Published:
    """SparseLoCo in plain torch."""

    name: str = "published SparseLoCo, plain torch"
    pipeline: PublishedSparseLoCo = field(default_factory=lambda: PublishedSparseLoCo(decay=_DECAY))

    def encode(self, tensor_N: Tensor, debt_N: Tensor, shapes: Shapes) -> list[list[Tensor]]:
        """Tensor by tensor."""
        return [
            self.pipeline.encode(t, d)[0]
            for t, d in zip(split_shapes(tensor_N, shapes), split_shapes(debt_N, shapes), strict=True)
        ]

    def nbytes(self, sent: list[list[Tensor]]) -> int:
        """Without header or signature."""
        return sum(self.pipeline.nbytes(tensors) for tensors in sent)

    def add_to(self, total_N: Tensor, sent: list[list[Tensor]], shapes: Shapes) -> None:
        """Dense, tensor by tensor, unchecked."""
        for total, tensors in zip(split_shapes(total_N, shapes), sent, strict=True):
            total += self.pipeline.decode(tensors, total)

    def entropy_bound_bits(self, sent: Any, shapes: Shapes) -> None:
        """Not of interest: what it packs is what ours codes."""
        return


@dataclass(frozen=True, slots=True)
class Hivemind:
    """A codec of hivemind's, on the flat tensor."""

    name: str
    codec: Any  # hivemind ships no types

    def encode(self, tensor_N: Tensor, debt_N: Tensor, shapes: Shapes) -> Any:
        """Its protobuf."""
        from hivemind.compression import CompressionInfo

        return self.codec.compress(tensor_N, CompressionInfo.from_tensor(tensor_N))

    def nbytes(self, sent: Any) -> int:
        """The serialised message."""
        return int(sent.ByteSize())

    def add_to(self, total_N: Tensor, sent: Any, shapes: Shapes) -> None:
        """Dense."""
        total_N += self.codec.extract(sent)

    def entropy_bound_bits(self, sent: Any, shapes: Shapes) -> None:
        """Unknown."""
        return


@dataclass(frozen=True, slots=True)
class Zstd:
    """The float32 bytes through zstandard."""

    name: str
    level: int

    def encode(self, tensor_N: Tensor, debt_N: Tensor, shapes: Shapes) -> bytes:
        """Return one frame."""
        import zstandard

        return zstandard.ZstdCompressor(level=self.level).compress(tensor_N.numpy().data)

    def nbytes(self, sent: bytes) -> int:
        """The frame."""
        return len(sent)

    def add_to(self, total_N: Tensor, sent: bytes, shapes: Shapes) -> None:
        """Bounded by the tensor's own size."""
        import zstandard

        data = zstandard.ZstdDecompressor().decompress(sent, max_output_size=4 * total_N.numel())
        total_N += torch.frombuffer(bytearray(data), dtype=torch.float32)

    def entropy_bound_bits(self, sent: Any, shapes: Shapes) -> None:
        """Unknown."""
        return


def ours() -> list[Contestant]:
    """Every registered method with its defaults, and chains that runs use."""
    signer = Signer(bytes(32))
    spellings = [str(row["spelling"]) for row in describe_compressors()]
    compressors: list[Compressor] = [parse_compressor(spelling) for spelling in (*spellings, *_CHAINS)]
    return [
        Ours(str(c), Codec(c, ErrorFeedback(_DECAY) if isinstance(c, Chain) else NoFeedback()), signer)
        for c in compressors
    ]


def others() -> list[Contestant]:
    """Return what people would use instead."""
    quiet_hivemind()
    from hivemind import compression

    codecs = (
        compression.Float16Compression(),
        compression.ScaledFloat16Compression(),
        compression.Uniform8BitQuantization(),
        compression.Quantile8BitQuantization(),
    )
    theirs: list[Contestant] = [Hivemind(f"hivemind {type(codec).__name__}", codec) for codec in codecs]
    return [Published(), *theirs, Zstd("zstd level 1", 1), Zstd("zstd level 3", 3)]


def _header(sender: bytes) -> Header:
    nothing = bytes(32)
    return Header(FrameKind.CONTRIBUTION, nothing, 1, 1, 0, 0, 1, 0, nothing, sender, 1, 1)


# ---- how few bits would do ----
#
# For the parts of a payload: what an ideal code needs that knows how often each symbol comes.


def information_bits(compressor: Compressor, payloads: Sequence[Payload]) -> float:
    """Bits in all. Symbols count by their empirical entropy over all parts of one name; rising indices by the
    logarithm of the number of subsets; sign and mantissa of floats in full.
    """
    named: dict[str, list[tuple[PartSpec, np.ndarray[tuple[int, ...], np.dtype[np.generic]]]]] = {}
    for payload in payloads:
        for spec, part in zip(compressor.layout(payload.shape), payload.parts, strict=True):
            named.setdefault(spec.name, []).append((spec, to_array(part)))
    return sum(_bits_of_one_name(members) for members in named.values())


def _bits_of_one_name(members: list[tuple[PartSpec, np.ndarray[tuple[int, ...], np.dtype[np.generic]]]]) -> float:
    bits, symbols = 0.0, []
    for spec, array in members:
        if isinstance(spec.kind, coding.Rising):
            rows, columns = prod(spec.shape[:-1]), spec.shape[-1]
            bits += rows * _log2_subsets(spec.kind.limit, columns)
            continue
        codes, _ = spec.kind.to_symbols(array)
        symbols.append(codes)
        bits += 8 * spec.kind.side_nbytes(codes, array.dtype.itemsize)
    return bits + (_entropy_bits(np.concatenate(symbols)) if symbols else 0.0)


def _entropy_bits(symbols: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> float:
    count = np.bincount(symbols, minlength=1)
    count = count[count > 0]
    return float(-(count * np.log2(count / max(1, symbols.size))).sum())


def _log2_subsets(limit: int, columns: int) -> float:
    return (lgamma(limit + 1) - lgamma(columns + 1) - lgamma(limit - columns + 1)) / log(2)
