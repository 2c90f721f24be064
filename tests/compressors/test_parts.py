"""The parts of each method by hand: golden bytes, how many there are, and which of a peer's are refused.

Golden parts are the wire format: a change needs a new frame version. Of methods that draw, rounding may change
without one.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from decentral.compressors import Compressor, Payload, accumulate, parse_compressor
from decentral.errors import ConfigError, PayloadError


def as_sent(part: Tensor) -> list[Any]:
    """Of bfloat16 the bits."""
    return (part.view(torch.int16) if part.dtype == torch.bfloat16 else part).tolist()


GOLDEN = [
    ("e3m0(block=4)", [1.0, -0.5, 0.25, 0.0, -8.0], [[7, 6 + 8, 5, 0, 7 + 8], [0x3F80, 0x4100]]),
    ("fp8(block=4)", [448.0, -1.0, 0.4, -0.0001, 0.0], [[0x7E, 0xB8, 0x2D, 0x00, 0x00], [0x3F80, 0x0000]]),
    ("int4(block=4)", [7.0, -1.0, 0.4, 2.5, -14.0], [[15, 7, 8, 10, 1], [0x3F80, 0x4000]]),
    ("int8(block=2)", [127.0, -1.0, 0.0], [[255, 127, 128], [1.0, 0.0]]),
    ("nf4(block=4)", [1.0, -1.0, 0.25, 0.0, -8.0], [[15, 0, 10, 7, 0], [0x3F80, 0x4100]]),
    ("sign(block=4)", [1.0, -0.5, 0.25, 0.0, -8.0], [[0, 1, 0, 0, 1], [0x3EE0, 0x4100]]),
    ("signmag2", [[1.0, -4.0, 4.0, -1.0, 1.0]], [[0, 3, 1, 2, 0], [102], [240], [32]]),
    ("sparseloco2", [-9.0, -1.0, 1.0, 2.0, 7.0], [[1, 2, 2, 2, 3], [0.0, -9.0, 0.6666666865348816, 7.0]]),
    ("codebook8", [1.0, 2.0, 3.0, 4.0, 20.0],
     [[6, 6, 6, 7, 12], [0.0] * 6 + [2.0, 4.0] + [0.0] * 4 + [20.0] + [0.0] * 3]),
    ("natural", [1.0, -2.0, 0.25, 0.0, -0.0], [[125, 128 + 126, 123, 0, 0], [149 - 124]]),
    ("qsgd(levels=7, block=4)", [7.0, -1.0, 0.0, 3.0, -14.0], [[14, 6, 7, 10, 0], [0x3F80, 0x4000]]),
    ("topk(k=3, chunk=16)", [0.0] * 3 + [-2.0] + [0.0] * 7 + [1.0] + [0.0] * 3 + [0.5],
     [[[3, 11, 15]], [-2.0, 1.0, 0.5]]),
    ("threshold(k=1)", [0.0] * 3 + [-2.0] + [0.0] * 6996 + [1.0] + [0.0] * 1191, [[[3, 7000]], [-2.0, 1.0]]),
]  # fmt: skip


@pytest.mark.parametrize(("spelling", "values", "parts"), GOLDEN, ids=[row[0] for row in GOLDEN])
def test_golden_parts(spelling: str, values: list[Any], parts: list[list[Any]]):
    payload = parse_compressor(spelling).compress_one(torch.tensor(values))
    assert [as_sent(part) for part in payload.parts] == parts


@pytest.mark.parametrize(
    ("spelling", "shape", "nbytes"),
    [
        ("e3m0(block=256)", (513,), [257, 6]),
        ("fp8(block=256)", (513,), [513, 6]),
        ("int4(block=256)", (513,), [257, 6]),
        ("int8(block=4096)", (4097,), [4097, 8]),
        ("nf4(block=64)", (129,), [65, 6]),
        ("sign(block=1024)", (1025,), [129, 4]),
        ("natural", (1000,), [1000, 1]),
        *((f"qsgd(levels={n}, block=8)", (8,), [bits, 2]) for n, bits in ((1, 2), (3, 3), (7, 4), (8, 5), (127, 8))),
        ("topk(k=64, chunk=4096)", (4096,), [96, 256]),
        ("topk(k=64, chunk=4096) >> signmag2", (4096,), [96, 16, 1, 1, 1]),
        ("randk(k=64, chunk=4096)", (1024, 1024), [8, 4 * 1024 * 1024 // 64]),
        ("lowrank(rank=4)", (1024, 1024), [8192, 8192, 1]),
    ],
)
def test_a_tensor_takes_so_many_bytes_at_most(spelling: str, shape: tuple[int, ...], nbytes: list[int]):
    assert [spec.nbytes for spec in parse_compressor(spelling).layout(shape)] == nbytes


def test_signmag2_makes_three_bytes_of_every_chunk_behind_topk_and_sparseloco2_one_grid_of_all():
    layout = parse_compressor("topk(k=64, chunk=4096) >> sparseloco2").layout((128, 128))
    assert [(spec.name, spec.shape) for spec in layout] == [("index", (4, 64)), ("codes", (256,)), ("levels", (4,))]


# ---- parts of a peer that are refused ----
#
# Each row: the method, and of one tensor the parts as sent with a bad one among them, and the words.

U8, BF16, F32 = torch.uint8, torch.bfloat16, torch.float32
NO_NUMBERS = (-1.0, math.inf, math.nan)


def bad_scales(spelling: str, codes: list[int], words: str, dtype: torch.dtype = BF16, beyond: float | None = None):
    scales = (*NO_NUMBERS, *([] if beyond is None else [beyond]))
    return [(spelling, (len(codes),), [(U8, codes), (dtype, [scale])], words) for scale in scales]


REFUSED = [
    *bad_scales("e3m0(block=4)", [0] * 4, "scale"),
    *bad_scales("fp8(block=4)", [0] * 4, "a scale is bad: want 0 <= 448", beyond=1e36),
    *bad_scales("int4(block=4)", [1] * 4, "a scale is bad: want 0 <= 7", beyond=1e38),
    *bad_scales("int8(block=4)", [1] * 4, "scale", F32, beyond=3e38),
    *bad_scales("nf4(block=4)", [0] * 4, "scale"),
    *bad_scales("sign(block=4)", [0] * 4, "scale"),
    *bad_scales("qsgd(levels=7, block=4)", [0] * 4, "a scale is bad: want 0 <= 7", beyond=1e38),
    ("e3m0(block=4)", (3,), [(U8, [8, 0, 0]), (BF16, [1.0])], "minus zero"),
    ("e3m0(block=4)", (3,), [(U8, [0, 16, 0]), (BF16, [1.0])], "codes must be below 16"),
    *(("fp8(block=4)", (3,), [(U8, [0, code, 0]), (BF16, [1.0])], "NaN and minus zero") for code in (0x7F, 0x80, 0xFF)),
    ("int4(block=4)", (4,), [(U8, [0] * 4), (BF16, [1.0])], "code 0 is not used"),
    ("int4(block=4)", (4,), [(U8, [16] * 4), (BF16, [1.0])], "codes must be below 16"),
    ("int8(block=4)", (4,), [(U8, [0] * 4), (F32, [1.0])], "code 0"),
    ("sign(block=4)", (2,), [(U8, [0, 2]), (BF16, [1.0])], "codes must be below 2"),
    ("qsgd(levels=7, block=4)", (2,), [(U8, [0, 15]), (BF16, [1.0])], "codes must be at most 14"),
    ("natural", (2,), [(U8, [0, 128]), (U8, [0])], "minus zero"),
    ("natural", (2,), [(U8, [0, 0]), (U8, [151])], "at most 150"),
    ("signmag2", (1, 2), [(U8, [0, 4]), (U8, [100]), (U8, [240]), (U8, [32])], "codes must be below 4"),
    ("signmag2", (1, 2), [(U8, [0, 1]), (U8, [228]), (U8, [240]), (U8, [32])], "a peak is beyond float32"),
    ("signmag2", (1, 2), [(U8, [0, 1]), (U8, [100]), (U8, [240]), (U8, [255])], "below zero"),
    ("sparseloco2", (2,), [(U8, [0, 4]), (F32, [0.0] * 4)], "codes must be below 4"),
    *(("sparseloco2", (2,), [(U8, [0, 0]), (F32, [0.0, 0.0, 0.0, bad])], "every level must be finite")
      for bad in (math.inf, math.nan)),
    *(("codebook8", (4,), [(U8, [0] * 4), (F32, [bad] * 16)], "every level must be finite")
      for bad in (math.inf, math.nan)),
    *(("threshold", (192,), [(torch.int32, [index]), (F32, [1.0] * 3)], "rise strictly within [0, 192)")
      for index in ([0, 0, 1], [2, 1, 3], [-1, 0, 1], [0, 1, 192], [0, 1, 2**31 - 1])),
    *(("topk(k=205, chunk=4096)", (100,), [(torch.int16, [index]), (F32, [1.0] * 5)], "indices must rise strictly")
      for index in ([1, 2, 3, 4, 100], [1, 2, 3, 4, 4095], [1, 1, 2, 3, 4], [5, 4, 3, 2, 1], [1, 2, 2, 3, 4],
                    [0, 0, 0, 0, 0], [-1, 0, 1, 2, 3])),
    *(("dct", (128,), [(torch.int16, [index]), (F32, [1.0] * 2)], "rise strictly")
      for index in ([1, 1], [2, 1], [-1, 3], [0, 128])),
]  # fmt: skip


@pytest.mark.parametrize(("spelling", "shape", "parts", "words"), REFUSED)
def test_parts_without_a_meaning_are_refused_and_nothing_is_added(
    spelling: str, shape: tuple[int, ...], parts: list[tuple[torch.dtype, list[Any]]], words: str
):
    payload = Payload(shape, tuple(torch.tensor(values, dtype=dtype) for dtype, values in parts))
    total = torch.zeros(shape)
    with pytest.raises(PayloadError) as refused:
        accumulate(parse_compressor(spelling), total, payload)
    assert words in str(refused.value)
    assert not total.any()


# ---- arguments that cannot be meant ----


@pytest.mark.parametrize(
    ("spelling", "words"),
    [
        *((f"{name}(block={block})", "1 to 65536") for name in ("e3m0", "fp8", "int4", "int8", "nf4", "sign", "qsgd")
          for block in (0, -1, 65537)),
        ("int8(block=1000000000000000000000000000000)", "1 to 65536"),
        ("qsgd(levels=0)", "levels must be 1 to 127"),
        ("qsgd(levels=128)", "levels must be 1 to 127"),
        *((f"{name}(seed={seed})", "a seed") for name in ("qsgd", "natural", "randk") for seed in (-1, 2**32)),
        *((f"{name}({keys})", f"{name}(k=") for name in ("topk", "dct") for keys in
          ("k=0, chunk=4096", "k=-1, chunk=4096", "k=4097, chunk=4096", "k=1, chunk=0", "k=1, chunk=-4",
           "k=64, chunk=4000", "k=64, chunk=16384", "k=17, chunk=16")),
        *((f"randk({keys})", "randk(k=") for keys in
          ("k=0, chunk=4096", "k=4097, chunk=4096", "k=1, chunk=0", "k=1, chunk=65537")),
        *((f"threshold({keys})", "threshold(k=") for keys in ("k=0", "k=4097", "sample=0", "sample=1.5", "sample=nan")),
        *((f"lowrank({keys})", "lowrank(rank=") for keys in ("rank=0", "rank=257", "iterations=0", "iterations=101")),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be_meant_are_refused(spelling: str, words: str):
    with pytest.raises(ConfigError) as refused:
        parse_compressor(spelling)
    assert words in str(refused.value)


# ---- what is exact ----


def test_code_times_scale_is_exact_so_that_no_device_rounds_it_differently():
    """A level has few bits, and so has a scale: their product is one of float32."""
    value = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    nf4 = _levels("nf4(block=16)", 16)
    levels = {
        "fp8(block=64)": lambda codes: codes.view(torch.float8_e4m3fn).double(),
        "int8(block=64)": lambda codes: codes.double() - 128,
        "nf4(block=64)": lambda codes: nf4[codes.long()],
    }
    for spelling, level_of in levels.items():
        method = parse_compressor(spelling)
        payload = method.compress_one(value)
        codes, scales = payload.parts
        exact = level_of(codes) * scales.double().repeat_interleave(64)
        assert torch.equal(method.decompress_one(payload).double(), exact), spelling


def _levels(spelling: str, count: int) -> Tensor:
    """What each code stands for at a scale of 1."""
    parts = (torch.arange(count, dtype=U8), torch.ones(1, dtype=BF16))
    return parse_compressor(spelling).decompress_one(Payload((count,), parts)).double()


def sent(method: Compressor, tensor: Tensor) -> Tensor:
    return method.decompress_one(method.compress_one(tensor))


EXACT = {
    "e3m0(block=256)": torch.tensor([sign * 2.0**-e for e in range(7) for sign in (1, -1)] + [0.0]),
    "fp8(block=256)": torch.tensor([n for n in range(256) if n & 0x7F != 0x7F], dtype=U8)
    .view(torch.float8_e4m3fn)
    .float(),
    "int4(block=16)": torch.arange(-7.0, 8.0),
    "int8(block=256)": torch.arange(-127.0, 128.0),
    "qsgd(levels=7, block=16)": torch.arange(-7.0, 8.0),
    "signmag2": torch.tensor([[1.0, -4.0, 4.0, -1.0, 1.0]]),
    "sparseloco2": torch.full((50,), 0.25),
    "codebook8": torch.full((5000,), 0.3),
    "topk(k=256, chunk=256)": torch.randn(67, 131, generator=torch.Generator().manual_seed(0)),
    "natural": torch.ldexp(torch.ones(126), torch.arange(-60, 66)),
}


@pytest.mark.parametrize("spelling", EXACT)
def test_values_on_its_levels_arrive_exactly(spelling: str):
    assert torch.equal(sent(parse_compressor(spelling), EXACT[spelling]), EXACT[spelling])


@pytest.mark.parametrize("spelling", ["e3m0(block=32768)", "nf4(block=32768)"])
def test_every_value_goes_to_the_nearest_level(spelling: str):
    method, value = parse_compressor(spelling), torch.linspace(-1, 1, 20001)
    levels = _levels(spelling, 16) if "nf4" in spelling else EXACT["e3m0(block=256)"].double()
    best = (value[:, None] - levels).abs().amin(dim=1)
    assert torch.allclose((sent(method, value) - value).abs().double(), best, rtol=0, atol=2e-5)


@pytest.mark.parametrize("spelling", ["threshold", "randk", "dct", "topk >> signmag2", "int8", "lowrank", "none"])
def test_a_total_that_is_a_transposed_view_is_added_to_in_place(spelling: str):
    method, chance = parse_compressor(spelling), torch.Generator().manual_seed(0)
    payload, base = method.compress_one(torch.randn(67, 131, generator=chance)), torch.randn(131, 67, generator=chance)
    wanted = base.t() + method.decompress_one(payload) * -0.3
    accumulate(method, base.t(), payload, -0.3)
    assert torch.equal(base.t(), wanted)
