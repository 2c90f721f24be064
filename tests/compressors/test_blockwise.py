"""tests/compressors/test_blockwise.py"""

import pytest
import torch

from decentral.compressors import (
    E3M0,
    FP8,
    NF4,
    Int4,
    Int8,
    Payload,
    Sign,
    accumulate,
    blocks,
)
from decentral.errors import ConfigError, NonFiniteError, PayloadError


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def sent(tensor: torch.Tensor, block: int = 256) -> torch.Tensor:
    return E3M0(block=block).decompress_one(E3M0(block=block).compress_one(tensor))


def test_the_levels_are_zero_and_seven_powers_of_two_with_both_signs():
    levels = torch.tensor([0.0, *(2.0**-e for e in range(7))])
    both = torch.cat([levels, -levels])
    assert torch.equal(sent(both), both)


def test_every_value_goes_to_the_nearest_level_of_e3m0():
    value = torch.linspace(-1, 1, 20001)
    levels = torch.tensor([0.0, *(sign * 2.0**-e for e in range(7) for sign in (1, -1))])
    best = (value[:, None] - levels).abs().amin(dim=1)
    assert torch.allclose((sent(value, block=32768) - value).abs(), best, rtol=0, atol=1e-6)


def test_at_most_4_bits_per_value_and_2_bytes_per_block_of_e3m0():
    assert [spec.nbytes for spec in E3M0(block=256).layout((513,))] == [257, 6]


def test_golden_bytes():
    """These parts are the wire format; a change needs a new frame version."""
    codes, scales = E3M0(block=4).compress_one(torch.tensor([1.0, -0.5, 0.25, 0.0, -8.0])).parts
    assert codes.tolist() == [7, 6 + 8, 5, 0, 7 + 8]
    assert scales.view(torch.int16).tolist() == [0x3F80, 0x4100]


@pytest.mark.parametrize("scale", [-1.0, float("inf"), float("nan")])
def test_a_scale_out_of_range_is_refused_of_e3m0(scale):
    parts = (torch.zeros(4, dtype=torch.uint8), torch.tensor([scale], dtype=torch.bfloat16))
    with pytest.raises(PayloadError, match="scale"):
        E3M0(block=4).decompress_one(Payload((4,), parts))


def test_minus_zero_and_codes_beyond_4_bits_are_refused():
    scale = torch.ones(1, dtype=torch.bfloat16)
    with pytest.raises(PayloadError, match="minus zero"):
        E3M0(block=4).decompress_one(Payload((3,), (torch.tensor([8, 0, 0], dtype=torch.uint8), scale)))
    with pytest.raises(PayloadError, match="codes must be below 16"):
        E3M0(block=4).decompress_one(Payload((3,), (torch.tensor([0, 16, 0], dtype=torch.uint8), scale)))


@pytest.mark.parametrize("block", [0, -1, 65537])
def test_a_block_that_cannot_be_meant_is_refused_of_e3m0(block):
    with pytest.raises(ConfigError, match="1 to 65536"):
        E3M0(block=block)


def sent_of_fp8(tensor: torch.Tensor, block: int = 256) -> torch.Tensor:
    return FP8(block=block).decompress_one(FP8(block=block).compress_one(tensor))


def test_the_table_is_torchs_own_float8_e4m3fn():
    used = [code for code in range(256) if code not in (0x7F, 0x80, 0xFF)]
    codes = torch.tensor(used, dtype=torch.uint8)
    parts = (codes, torch.ones(1, dtype=torch.bfloat16))
    back = FP8(block=256).decompress_one(Payload((253,), parts))
    assert torch.equal(back, codes.view(torch.float8_e4m3fn).float())


def test_every_level_is_sent_exactly():
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    levels = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(sent_of_fp8(levels), levels)


def test_a_value_is_off_by_a_sixteenth_of_itself_or_half_the_smallest_level():
    tensor = gaussian(10_000) ** 5
    scale = FP8(block=100).compress_one(tensor).parts[1].float().repeat_interleave(100)
    assert ((sent_of_fp8(tensor, 100) - tensor).abs() <= (tensor.abs() / 16).maximum(scale / 1024)).all()


def test_small_values_beside_a_large_one_keep_their_digits_where_int8_has_none():
    tensor = gaussian(256)
    tensor[0] = 1000.0
    lost = {
        method: method.decompress_one(method.compress_one(tensor))[1:] - tensor[1:] for method in (FP8(256), Int8(256))
    }
    assert float(lost[FP8(256)].norm()) < 0.1 * float(lost[Int8(256)].norm())


def test_code_times_scale_is_exact_so_that_no_device_rounds_it_differently_of_fp8():
    codes, scales = FP8(block=64).compress_one(gaussian(4096)).parts
    levels = codes.view(torch.float8_e4m3fn).double()
    exact = levels * scales.double().repeat_interleave(64)
    assert torch.equal(sent_of_fp8(gaussian(4096), 64).double(), exact)


def test_golden_bytes_of_fp8():
    """These parts are the wire format; a change needs a new frame version."""
    codes, scales = FP8(block=4).compress_one(torch.tensor([448.0, -1.0, 0.4, -0.0001, 0.0])).parts
    assert codes.tolist() == [0x7E, 0xB8, 0x2D, 0x00, 0x00]
    assert scales.view(torch.int16).tolist() == [0x3F80, 0x0000]


def test_at_most_8_bits_per_value_and_2_bytes_per_block():
    assert [spec.nbytes for spec in FP8(block=256).layout((513,))] == [513, 6]


@pytest.mark.parametrize("code", [0x7F, 0x80, 0xFF])
def test_nan_and_minus_zero_are_refused(code):
    parts = (torch.tensor([0, code, 0], dtype=torch.uint8), torch.ones(1, dtype=torch.bfloat16))
    with pytest.raises(PayloadError, match="NaN and minus zero"):
        FP8(block=4).decompress_one(Payload((3,), parts))


@pytest.mark.parametrize("scale", [-1.0, 1e36, float("inf"), float("nan")])
def test_a_scale_that_is_negative_or_would_overflow_is_refused_of_fp8(scale):
    parts = (torch.zeros(4, dtype=torch.uint8), torch.tensor([scale], dtype=torch.bfloat16))
    with pytest.raises(PayloadError, match="a scale is bad: want 0 <= 448"):
        FP8(block=4).decompress_one(Payload((4,), parts))


@pytest.mark.parametrize("block", [0, -1, 65537])
def test_a_block_that_cannot_be_meant_is_refused(block):
    with pytest.raises(ConfigError, match="1 to 65536"):
        FP8(block=block)


def test_no_value_is_off_by_more_than_half_a_step_of_its_block_of_int4():
    tensor = gaussian(1000) * torch.logspace(-6, 6, 1000)
    payload = Int4(block=10).compress_one(tensor)
    step = payload.parts[1].float().repeat_interleave(10)
    lost = (Int4(block=10).decompress_one(payload) - tensor).abs()
    assert (lost <= step / 2 * (1 + 1e-6)).all()
    assert (lost <= tensor.abs()).all()
    assert (step <= tensor.view(-1, 10).abs().amax(1).repeat_interleave(10) / 7 * (1 + 1 / 128)).all()


def test_whole_numbers_up_to_7_are_exact():
    tensor = torch.arange(-7.0, 8.0)
    assert torch.equal(Int4(block=16).decompress_one(Int4(block=16).compress_one(tensor)), tensor)


def test_at_most_4_bits_per_value_and_2_bytes_per_block():
    assert [spec.nbytes for spec in Int4(block=256).layout((513,))] == [257, 6]


def test_golden_bytes_of_int4():
    """These parts are the wire format; a change needs a new frame version."""
    codes, scales = Int4(block=4).compress_one(torch.tensor([7.0, -1.0, 0.4, 2.5, -14.0])).parts
    assert codes.tolist() == [15, 7, 8, 10, 1]
    assert scales.view(torch.int16).tolist() == [0x3F80, 0x4000]


@pytest.mark.parametrize("scale", [-1.0, 1e38, float("inf"), float("nan")])
def test_a_scale_that_is_negative_or_would_overflow_is_refused(scale):
    parts = (torch.ones(4, dtype=torch.uint8), torch.tensor([scale], dtype=torch.bfloat16))
    with pytest.raises(PayloadError, match="a scale is bad: want 0 <= 7"):
        Int4(block=4).decompress_one(Payload((4,), parts))


@pytest.mark.parametrize(("code", "rule"), [(0, "code 0 is not used"), (16, "codes must be below 16")])
def test_codes_without_a_meaning_are_refused(code, rule):
    parts = (torch.full((4,), code, dtype=torch.uint8), torch.ones(1, dtype=torch.bfloat16))
    with pytest.raises(PayloadError, match=rule):
        Int4(block=4).decompress_one(Payload((4,), parts))


@pytest.mark.parametrize("block", [0, -1, 65537])
def test_a_block_that_cannot_be_meant_is_refused_of_int4(block):
    with pytest.raises(ConfigError, match="1 to 65536"):
        Int4(block=block)


def test_no_value_is_off_by_more_than_half_a_step_of_its_block():
    tensor = gaussian(1000) * torch.logspace(-6, 6, 1000)
    payload = Int8(block=10).compress_one(tensor)
    step = payload.parts[1].repeat_interleave(10)
    assert ((Int8(block=10).decompress_one(payload) - tensor).abs() <= step / 2 * (1 + 1e-6)).all()
    assert (step <= tensor.view(-1, 10).abs().amax(1).repeat_interleave(10) / 127 * (1 + 1 / 128)).all()


def test_whole_numbers_up_to_127_are_exact():
    tensor = torch.arange(-127.0, 128.0)
    assert torch.equal(Int8(block=256).decompress_one(Int8(block=256).compress_one(tensor)), tensor)


def test_code_times_scale_is_exact_so_that_no_device_rounds_it_differently():
    payload = Int8(block=64).compress_one(gaussian(4096))
    code, scale = payload.parts
    exact = (code.double() - 128) * scale.double().repeat_interleave(64)
    assert torch.equal(Int8(block=64).decompress_one(payload).double(), exact)


def test_an_outlier_spoils_only_its_own_block():
    tensor = gaussian(512)
    tensor[0] = 1e6
    lost = Int8(block=256).decompress_one(Int8(block=256).compress_one(tensor)) - tensor
    assert float(lost[256:].abs().max()) < 0.02


def test_it_costs_at_most_a_byte_per_value_and_4_per_block():
    assert [spec.nbytes for spec in Int8(block=4096).layout((4097,))] == [4097, 8]


def test_golden_bytes_of_int8():
    """These parts are the wire format; a change needs a new frame version."""
    codes, scales = Int8(block=2).compress_one(torch.tensor([127.0, -1.0, 0.0])).parts
    assert codes.tolist() == [255, 127, 128]
    assert scales.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("scale", [-1.0, 3e38, float("inf"), float("nan")])
def test_a_scale_that_is_negative_or_would_overflow_is_refused_of_int8(scale):
    with pytest.raises(PayloadError, match="scale"):
        Int8(block=4).decompress_one(Payload((4,), (torch.ones(4, dtype=torch.uint8), torch.tensor([scale]))))


def test_code_0_is_refused():
    with pytest.raises(PayloadError, match="code 0"):
        Int8(block=4).decompress_one(Payload((4,), (torch.full((4,), 0, dtype=torch.uint8), torch.ones(1))))


@pytest.mark.parametrize("block", [0, -1, 65537, 10**30])
def test_a_block_that_cannot_be_meant_is_refused_of_int8(block):
    with pytest.raises(ConfigError, match="1 to 65536"):
        Int8(block=block)


# ---- test linear ----
#
# The loop for the processor and the torch code for every other device say the same, to the bit.


def gaussian_of_linear(numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(0))


TENSORS = {
    "gaussian": gaussian_of_linear(20_011),
    "ties": torch.arange(-254.0, 255.0) / 2,
    "every magnitude": torch.logspace(-45, 38, 9001, dtype=torch.float64).float() * gaussian_of_linear(9001).sign(),
    "the ends": torch.tensor([torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max, 1.0]),
    "denormals": torch.linspace(-1e-39, 1e-39, 4099),
    "zeros": torch.zeros(50),
    "nothing": torch.empty(0),
    "one": torch.tensor([-3.0]),
}


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("block", [1, 7, 256, 4096, 65536])
@pytest.mark.parametrize("top", [7, 127])
def test_both_ways_of_quantising_give_the_same_bits(name: str, block: int, top: int):
    method = Int4(block) if top == 7 else Int8(block)
    slow, fast = blocks.Tabled.compress_one(method, TENSORS[name]), method.compress_one(TENSORS[name])
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(slow.parts, fast.parts, strict=True))


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("method", [Int8(7), Int8(4096), Int4(64), E3M0(256), E3M0(5)], ids=str)
def test_both_ways_of_decoding_give_the_same_bits(name: str, method, monkeypatch: pytest.MonkeyPatch):
    payload = method.compress_one(TENSORS[name])
    fast = method.decompress_one(payload)
    monkeypatch.setattr(blocks, "_on_processor", lambda tensor: False)
    slow = method.decompress_one(payload)
    assert torch.equal(slow.view(torch.int32), fast.view(torch.int32))


class Two(blocks.Tabled):
    """Code 1 is a zero, no other code is used."""

    name = "it"
    block = 8
    code = blocks.Code(8, blocks.table([blocks.UNUSED, 1.0]), 1, "no such code")
    scales = torch.zeros(13, dtype=torch.bfloat16)

    def __str__(self) -> str:
        return self.name


@pytest.mark.parametrize("fast", [True, False])
def test_an_unused_code_is_refused_wherever_it_stands_and_nothing_is_added(fast: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(blocks, "_on_processor", lambda tensor: fast)
    codes, total = torch.ones(100, dtype=torch.uint8), torch.ones(100)
    assert Two().decompress_one(Payload((100,), (codes, Two.scales))).tolist() == [0.0] * 100
    for place in (0, 50, 99):
        for code in (0, 2, 255):
            bad = codes.clone()
            bad[place] = code
            with pytest.raises(PayloadError, match="it: no such code"):
                Two().decompress_one(Payload((100,), (bad, Two.scales)))
            with pytest.raises(PayloadError, match="it: no such code"):
                accumulate(Two(), total, Payload((100,), (bad, Two.scales)), 1.0)
    assert total.tolist() == [1.0] * 100


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf")])
def test_the_loop_finds_what_is_not_finite_in_every_block(bad: float):
    for place in range(20):
        tensor = gaussian_of_linear(20)
        tensor[place] = bad
        with pytest.raises(NonFiniteError, match=r"shape \(20,\)"):
            Int8(block=7).compress_one(tensor)


# QLoRA, appendix E.
PUBLISHED = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]


def sent_of_nf4(tensor: torch.Tensor, block: int = 64) -> torch.Tensor:
    return NF4(block=block).decompress_one(NF4(block=block).compress_one(tensor))


def test_the_levels_are_the_published_ones():
    codes = torch.arange(16, dtype=torch.uint8)
    back = NF4(block=16).decompress_one(Payload((16,), (codes, torch.ones(1, dtype=torch.bfloat16))))
    assert torch.allclose(back, torch.tensor(PUBLISHED), rtol=0, atol=2**-17)
    assert torch.equal(NF4(block=16).compress_one(torch.tensor(PUBLISHED)).parts[0], codes)


def test_every_value_goes_to_the_nearest_level():
    value = torch.linspace(-1, 1, 20001)
    best = (value[:, None] - torch.tensor(PUBLISHED)).abs().amin(dim=1)
    assert torch.allclose((sent_of_nf4(value, 32768) - value).abs(), best, rtol=0, atol=2e-5)


def test_level_times_scale_is_exact_so_that_no_device_rounds_it_differently():
    tensor = gaussian(4096)
    codes, scales = NF4(block=64).compress_one(tensor).parts
    levels = torch.tensor([round(level * 2**16) / 2**16 for level in PUBLISHED], dtype=torch.float64)
    assert torch.equal(sent_of_nf4(tensor).double(), levels[codes.long()] * scales.double().repeat_interleave(64))


def test_a_gaussian_fills_its_levels_more_evenly_than_those_of_int4():
    tensor = gaussian(64 * 1000)
    fullest = [method.compress_one(tensor).parts[0].bincount().max() for method in (NF4(block=64), Int4(block=64))]
    assert fullest[0] < 0.1 * tensor.numel() < 0.12 * tensor.numel() < fullest[1]


def test_golden_bytes_of_nf4():
    """These parts are the wire format; a change needs a new frame version."""
    codes, scales = NF4(block=4).compress_one(torch.tensor([1.0, -1.0, 0.25, 0.0, -8.0])).parts
    assert codes.tolist() == [15, 0, 10, 7, 0]
    assert scales.view(torch.int16).tolist() == [0x3F80, 0x4100]


def test_at_most_4_bits_per_value_and_2_bytes_per_block_of_nf4():
    assert [spec.nbytes for spec in NF4(block=64).layout((129,))] == [65, 6]


@pytest.mark.parametrize("scale", [-1.0, float("inf"), float("nan")])
def test_a_scale_out_of_range_is_refused(scale):
    parts = (torch.zeros(4, dtype=torch.uint8), torch.tensor([scale], dtype=torch.bfloat16))
    with pytest.raises(PayloadError, match="scale"):
        NF4(block=4).decompress_one(Payload((4,), parts))


@pytest.mark.parametrize("block", [0, -1, 65537])
def test_a_block_that_cannot_be_meant_is_refused_of_nf4(block):
    with pytest.raises(ConfigError, match="1 to 65536"):
        NF4(block=block)


def sent_of_sign(tensor: torch.Tensor, block: int) -> torch.Tensor:
    return Sign(block=block).decompress_one(Sign(block=block).compress_one(tensor))


def test_a_value_arrives_as_its_sign_times_the_mean_magnitude_of_its_block():
    assert sent_of_sign(torch.tensor([1.0, -2.0, 6.0, -0.5, 0.25, 0.0]), 3).tolist() == [
        3.0,
        -3.0,
        3.0,
        -0.25,
        0.25,
        0.25,
    ]


def test_a_short_last_block_has_the_mean_of_its_own_values():
    assert sent_of_sign(torch.full((5,), 3.0), 4).tolist() == [3.0] * 5


def test_what_is_lost_is_what_the_formula_says():
    """|x|**2 - (sum of |x|)**2 / block, up to the scale's 8 bits."""
    tensor = gaussian(10, 100).double()
    lost = (sent_of_sign(tensor.float().flatten(), 100).view(10, 100).double() - tensor).square().sum(1)
    wanted = tensor.square().sum(1) - tensor.abs().sum(1).square() / 100
    assert (lost >= wanted * (1 - 1e-6)).all()
    assert (lost <= wanted + tensor.abs().sum(1).square() / 100 * 2**-14).all()


def test_no_other_scale_of_8_bits_loses_clearly_less():
    tensor = gaussian(1024)
    least = float((sent_of_sign(tensor, 1024) - tensor).square().sum())
    for scale in torch.linspace(0.5, 1.2, 71):
        assert least <= float((tensor.sign() * scale - tensor).square().sum()) * (1 + 1e-4)


def test_minus_zero_counts_as_negative_so_that_the_mirrored_tensor_arrives_mirrored():
    tensor = torch.tensor([0.0, -0.0, 5.0, -1.0])
    assert torch.equal(sent_of_sign(-tensor, 4), -sent_of_sign(tensor, 4))


def test_1_bit_per_value_and_2_bytes_per_block():
    assert [spec.nbytes for spec in Sign(block=1024).layout((1025,))] == [129, 4]


def test_golden_bytes_of_sign():
    """These parts are the wire format; a change needs a new frame version."""
    codes, scales = Sign(block=4).compress_one(torch.tensor([1.0, -0.5, 0.25, 0.0, -8.0])).parts
    assert codes.tolist() == [0, 1, 0, 0, 1]
    assert scales.view(torch.int16).tolist() == [0x3EE0, 0x4100]


@pytest.mark.parametrize("scale", [-1.0, float("inf"), float("nan")])
def test_a_scale_out_of_range_is_refused_of_sign(scale):
    parts = (torch.zeros(4, dtype=torch.uint8), torch.tensor([scale], dtype=torch.bfloat16))
    with pytest.raises(PayloadError, match="scale"):
        Sign(block=4).decompress_one(Payload((4,), parts))


def test_a_code_beyond_1_bit_is_refused():
    parts = (torch.tensor([0, 2], dtype=torch.uint8), torch.ones(1, dtype=torch.bfloat16))
    with pytest.raises(PayloadError, match="codes must be below 2"):
        Sign(block=4).decompress_one(Payload((2,), parts))


@pytest.mark.parametrize("block", [0, -1, 65537])
def test_a_block_that_cannot_be_meant_is_refused_of_sign(block):
    with pytest.raises(ConfigError, match="1 to 65536"):
        Sign(block=block)
