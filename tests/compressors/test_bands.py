"""A payload added band by band is the payload added at once, bit for bit."""

import math

import pytest
import torch

from decentral.compressors import Payload, accumulate, parse_compressor
from decentral.compressors.chain import band_of, opened
from decentral.errors import PayloadError

SHAPES = [(64, 64), (700, 4096), (600, 1365), (64 * 9 + 5, 2048), (3, 5), (1 << 21,), (20, 3, 40_000), (0, 7), (130, 1)]
SPELLINGS = [
    "topk(k=64, chunk=4096) >> signmag2",
    "topk(k=8, chunk=256) >> int8",
    "topk",
    "randk >> fp16",
    "int8",
    "none",
]


def made(spelling: str, shape: tuple[int, ...]) -> Payload:
    return parse_compressor(spelling).compress(torch.randn(shape, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_bands_add_up_to_the_bits_of_the_whole(spelling: str, shape: tuple[int, ...]):
    compressor, payload, numel = parse_compressor(spelling), made(spelling, shape), math.prod(shape)
    whole_N = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    total_N, band = whole_N.clone(), band_of(compressor, shape)
    accumulate(compressor, whole_N.view(shape), payload, 0.3)
    (add,) = opened(compressor, [payload])
    for start in range(0, numel, max(1, band)):
        add(start, total_N[start : start + band], 0.3)
    assert torch.equal(total_N, whole_N)


@pytest.mark.parametrize("shape", [(700, 4096), (40_000, 64)], ids=str)
def test_a_large_matrix_has_several_bands_of_whole_tiles(shape: tuple[int, ...]):
    band = band_of(parse_compressor("topk >> signmag2"), shape)
    assert band < math.prod(shape)
    assert band % (64 * shape[1]) == 0


def test_an_index_out_of_its_place_is_refused_before_anything_is_added():
    compressor, payload = parse_compressor("topk >> signmag2"), made("topk >> signmag2", (700, 4096))
    index = payload.parts[0].clone()
    index[-1, -1] = index[-1, -2]
    with pytest.raises(PayloadError, match="rise"):
        opened(compressor, [Payload(payload.shape, (index, *payload.parts[1:]))])
