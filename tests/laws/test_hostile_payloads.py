"""A peer chose these bytes: decoding is total, and nothing but PayloadError comes out."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from decentral.compressors import Compressor, PartSpec, Payload, parse_compressor
from decentral.errors import PayloadError

SHAPES = [(), (13,), (4097,), (67, 131)]


def _decode(compressor: Compressor, payload: Payload) -> None:
    """Either a finite tensor of the right shape, or PayloadError."""
    try:
        back = compressor.decompress_one(payload)
    except PayloadError:
        return
    assert tuple(back.shape) == payload.shape
    assert bool(torch.isfinite(back).all())


def memory_nbytes(spec: PartSpec) -> int:
    """Bytes of the part before packing: a code takes one, whatever its bits."""
    return math.prod(spec.shape) * spec.dtype.itemsize


def _sends_floats(spelling: str) -> bool:
    return any(spec.dtype.is_floating_point for spec in parse_compressor(spelling).layout((67, 131)))


def _replaced(payload: Payload, place: int, part: Tensor) -> Payload:
    return Payload(payload.shape, (*payload.parts[:place], part, *payload.parts[place + 1 :]))


@pytest.fixture
def payload(compressor: Compressor, gaussian: Callable[..., Tensor]) -> Payload:
    return compressor.compress_one(gaussian((67, 131)))


def test_too_few_and_too_many_parts_are_refused(compressor: Compressor, payload: Payload):
    for parts in [(), payload.parts[:-1], (*payload.parts, payload.parts[-1])]:
        with pytest.raises(PayloadError, match=r"parts .* are wanted"):
            compressor.decompress_one(Payload(payload.shape, parts))


def test_a_part_of_another_dtype_is_refused(compressor: Compressor, payload: Payload):
    for place, part in enumerate(payload.parts):
        with pytest.raises(PayloadError):
            compressor.decompress_one(_replaced(payload, place, part.to(torch.float64)))


def test_a_part_of_another_shape_is_refused(compressor: Compressor, payload: Payload):
    for place, part in enumerate(payload.parts):
        longer = torch.cat([part, part[:1]])
        for bad in (part[:-1], longer, part[None], part.flatten()[:0]):
            with pytest.raises(PayloadError):
                compressor.decompress_one(_replaced(payload, place, bad))


@pytest.mark.parametrize("shape", [(-1,), (67, -131), (66, 131), (10**9, 10**9)])
def test_a_shape_that_does_not_fit_the_parts_is_refused_before_anything_is_allocated(
    compressor: Compressor, payload: Payload, shape: tuple[int, ...]
):
    with pytest.raises(PayloadError):
        compressor.decompress_one(Payload(shape, payload.parts))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_bytes_decode_or_are_refused(compressor: Compressor, shape: tuple[int, ...], device: str):
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        parts = tuple(
            torch.randint(0, 256, (memory_nbytes(spec),), dtype=torch.uint8, generator=generator)
            .view(spec.dtype)
            .view(spec.shape)
            .to(device)
            for spec in compressor.layout(shape)
        )
        _decode(compressor, Payload(shape, parts))


@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF])
def test_parts_of_one_byte_repeated_decode_or_are_refused(compressor: Compressor, byte: int, device: str):
    for shape in SHAPES:
        parts = tuple(
            torch.full((memory_nbytes(spec),), byte, dtype=torch.uint8).view(spec.dtype).view(spec.shape).to(device)
            for spec in compressor.layout(shape)
        )
        _decode(compressor, Payload(shape, parts))


def test_a_flipped_bit_anywhere_decodes_or_is_refused(compressor: Compressor, payload: Payload):
    generator = torch.Generator().manual_seed(0)
    for place, part in enumerate(payload.parts):
        for _ in range(20):
            raw = part.contiguous().clone().view(-1).view(torch.uint8)
            target = int(torch.randint(raw.numel(), (), generator=generator))
            raw[target] ^= 1 << int(torch.randint(8, (), generator=generator))
            _decode(compressor, _replaced(payload, place, raw.view(part.dtype).view(part.shape)))


@pytest.mark.methods(lambda spelling: _sends_floats(spelling))
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_or_scale_that_is_not_finite_is_refused(compressor: Compressor, payload: Payload, bad: float):
    for place, part in enumerate(payload.parts):
        if part.is_floating_point():
            poisoned = part.clone()
            poisoned.view(-1)[-1] = bad
            with pytest.raises(PayloadError):
                compressor.decompress_one(_replaced(payload, place, poisoned))
