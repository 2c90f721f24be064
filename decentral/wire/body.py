"""A compressor's parts to the bytes of a body, and back: one stream per part name, over all tensors of the frame.

Crosses the wire: streams (`decentral.coding.streams`), in the order in which the layout names them first. No count, no
dtype, no shape is ever read from a body: the compressor's layout gives them, and bounds the body by ``max_nbytes``.

Where some tensors have a compressor of their own, the body is sections, each the streams of one compressor, one behind
the other: a stream ends where its layout says, so nothing is written between them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decentral import coding
from decentral.compressors import Compressor, PartSpec, Payload
from decentral.errors import PayloadError
from decentral.tensors.memory import fresh
from decentral.tensors.threads import WORTH_IT, lumps, spread

Shape = tuple[int, ...]
Array = NDArray[np.generic]

_ON_THREADS = 1 << 18  # elements that are coded on several: a millisecond of work
_LUMP = 1 << 17  # elements
_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


def max_nbytes(compressor: Compressor, shapes: Sequence[Shape]) -> int:
    """Return the most bytes that the body of tensors of these shapes takes."""
    specs = _specs(compressor, shapes)
    return sum(spec.nbytes for spec in specs) + coding.PREFIX_NBYTES * len({spec.name for spec in specs})


def encode(compressor: Compressor, payloads: Sequence[Payload]) -> memoryview:
    """The body of these payloads. Raises PayloadError when a part is not as the compressor's layout says."""
    return encode_sections([(compressor, payloads)])


def encode_sections(sections: Sequence[tuple[Compressor, Sequence[Payload]]]) -> memoryview:
    """``encode`` of several compressors' payloads, one behind the other."""
    most = sum(max_nbytes(compressor, [one.shape for one in payloads]) for compressor, payloads in sections)
    written, at = np.empty(most, dtype=np.uint8).data, 0
    for compressor, payloads in sections:
        at += _write(written[at:], compressor, payloads)
    return written[:at].toreadonly()


def decode_sections(sections: Sequence[tuple[Compressor, Sequence[Shape]]], body: bytes | memoryview) -> list[Payload]:
    """``decode`` of what ``encode_sections`` wrote. Raises PayloadError."""
    data, at = np.frombuffer(body, dtype=np.uint8), 0
    found: list[Payload] = []
    for compressor, shapes in sections:
        payloads, taken = _read(compressor, data[at:], shapes)
        found += payloads
        at += taken
    if at != data.size:
        names = " and ".join(str(compressor) for compressor, _ in sections)
        raise PayloadError(f"body of {data.size} bytes, {names} reads {at} of them; drop it and its sender")
    return found


def decode(compressor: Compressor, body: bytes | memoryview, shapes: Sequence[Shape]) -> list[Payload]:
    """The payloads of a body, one per shape; their parts are what the layout says, and new.

    Raises PayloadError when the bytes are not those of any payloads. What the parts mean is not looked at.
    """
    return decode_sections([(compressor, shapes)], body)


def _write(into: memoryview, compressor: Compressor, payloads: Sequence[Payload]) -> int:
    """The streams of one compressor, into their place; how many bytes they are."""
    at = 0
    specs: list[PartSpec] = []
    parts: list[Tensor] = []
    for payload in payloads:
        layout = compressor.layout(payload.shape)
        found = [(part.dtype, tuple(part.shape)) for part in payload.parts]
        if found != [(spec.dtype, spec.shape) for spec in layout]:
            raise PayloadError(f"encode: parts {found} of {compressor} are not its layout {layout}; nothing was sent")
        specs += layout
        parts += payload.parts
    arrays = [to_array(part) for part in parts]
    for piece in _pieces(specs, arrays):  # into its place: pieces to be joined would be there twice
        into[at : at + len(piece)] = piece
        at += len(piece)
    return at


def _pieces(specs: Sequence[PartSpec], arrays: Sequence[Array]) -> Iterator[bytes | memoryview]:
    """The bytes of all streams: large ones on several threads, symbols by part and what is made of them by stream."""
    kinds, streams, made = [spec.kind for spec in specs], _streams(specs), list[coding.Made]()
    on_threads = len(streams) > 1 and sum(array.size for array in arrays) >= _ON_THREADS
    if on_threads:
        places = [range(len(arrays))[lump] for lump in lumps([array.size for array in arrays], _LUMP)]
        found = spread(lambda these: [kinds[i].to_symbols(arrays[i]) for i in these], places, WORTH_IT)
        made = list(itertools.chain.from_iterable(found))

    def coded(members: list[int]) -> Iterator[bytes | memoryview]:
        own = [made[i] for i in members] if on_threads else None
        return coding.encode([kinds[i] for i in members], [arrays[i] for i in members], own)

    if on_threads:
        return itertools.chain.from_iterable(spread(lambda members: list(coded(members)), streams, WORTH_IT))
    return itertools.chain.from_iterable(map(coded, streams))


def _read(compressor: Compressor, data: NDArray[np.uint8], shapes: Sequence[Shape]) -> tuple[list[Payload], int]:
    """Return the payloads that one compressor wrote at the beginning of ``data``, and how many bytes they take."""
    specs, at = _specs(compressor, shapes), 0
    parts: list[Tensor] = [fresh(0)] * len(specs)
    for members in _streams(specs):
        forms = [_form(specs[i]) for i in members]
        arrays, taken = coding.decode(forms, data[at:])
        at += taken
        for i, array in zip(members, arrays, strict=True):
            parts[i] = _to_tensor(array, specs[i])
    found, start = [], 0
    for shape in shapes:
        stop = start + len(compressor.layout(shape))
        found.append(Payload(shape, tuple(parts[start:stop])))
        start = stop
    return found, at


def _specs(compressor: Compressor, shapes: Sequence[Shape]) -> list[PartSpec]:
    return [spec for shape in shapes for spec in compressor.layout(shape)]


def _streams(specs: Sequence[PartSpec]) -> list[list[int]]:
    """The parts of one name, by their places."""
    members: dict[str, list[int]] = {}
    for i, spec in enumerate(specs):
        members.setdefault(spec.name, []).append(i)
    return list(members.values())


def _form(spec: PartSpec) -> coding.Form:
    return coding.Form(spec.kind, spec.shape, _dtype(spec.dtype, as_unsigned=isinstance(spec.kind, coding.Floats)))


@functools.lru_cache(maxsize=64)
def _dtype(dtype: torch.dtype, *, as_unsigned: bool) -> np.dtype[np.generic]:
    return np.dtype(f"u{dtype.itemsize}" if as_unsigned else str(dtype).removeprefix("torch."))


def to_array(part: Tensor) -> Array:
    """A part in the processor's memory; floats as unsigned integers, which numpy has of every width."""
    part = part.detach().cpu().contiguous()
    if part.is_floating_point():
        part = part.view(_UNSIGNED[part.element_size()])
    array: Array = part.numpy()
    return array


def _to_tensor(array: Array, spec: PartSpec) -> Tensor:
    part = torch.from_numpy(array)
    return part if part.dtype == spec.dtype else part.view(spec.dtype)
