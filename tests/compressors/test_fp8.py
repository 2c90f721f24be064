import pytest
import torch

from decentral.compressors import FP8, Int8, Payload
from decentral.errors import ConfigError, PayloadError


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def sent(tensor: torch.Tensor, block: int = 256) -> torch.Tensor:
    return FP8(block=block).decompress(FP8(block=block).compress(tensor))


def test_the_table_is_torchs_own_float8_e4m3fn():
    used = [code for code in range(256) if code not in (0x7F, 0x80, 0xFF)]
    codes = torch.tensor(used, dtype=torch.uint8)
    parts = (codes, torch.ones(1, dtype=torch.bfloat16))
    back = FP8(block=256).decompress(Payload((253,), parts))
    assert torch.equal(back, codes.view(torch.float8_e4m3fn).float())


def test_every_level_is_sent_exactly():
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    levels = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(sent(levels), levels)


def test_a_value_is_off_by_a_sixteenth_of_itself_or_half_the_smallest_level():
    tensor = gaussian(10_000) ** 5
    scale = FP8(block=100).compress(tensor).parts[1].float().repeat_interleave(100)
    assert ((sent(tensor, 100) - tensor).abs() <= (tensor.abs() / 16).maximum(scale / 1024)).all()


def test_small_values_beside_a_large_one_keep_their_digits_where_int8_has_none():
    tensor = gaussian(256)
    tensor[0] = 1000.0
    lost = {method: method.decompress(method.compress(tensor))[1:] - tensor[1:] for method in (FP8(256), Int8(256))}
    assert float(lost[FP8(256)].norm()) < 0.1 * float(lost[Int8(256)].norm())


def test_code_times_scale_is_exact_so_that_no_device_rounds_it_differently():
    codes, scales = FP8(block=64).compress(gaussian(4096)).parts
    levels = codes.view(torch.float8_e4m3fn).double()
    exact = levels * scales.double().repeat_interleave(64)
    assert torch.equal(sent(gaussian(4096), 64).double(), exact)


def test_golden_bytes():
    """These parts are the wire format; a change needs a new frame version."""
    codes, scales = FP8(block=4).compress(torch.tensor([448.0, -1.0, 0.4, -0.0001, 0.0])).parts
    assert codes.tolist() == [0x7E, 0xB8, 0x2D, 0x00, 0x00]
    assert scales.view(torch.int16).tolist() == [0x3F80, 0x0000]


def test_at_most_8_bits_per_value_and_2_bytes_per_block():
    assert [spec.nbytes for spec in FP8(block=256).layout((513,))] == [513, 6]


@pytest.mark.parametrize("code", [0x7F, 0x80, 0xFF])
def test_nan_and_minus_zero_are_refused(code):
    parts = (torch.tensor([0, code, 0], dtype=torch.uint8), torch.ones(1, dtype=torch.bfloat16))
    with pytest.raises(PayloadError, match="NaN and minus zero"):
        FP8(block=4).decompress(Payload((3,), parts))


@pytest.mark.parametrize("scale", [-1.0, 1e36, float("inf"), float("nan")])
def test_a_scale_that_is_negative_or_would_overflow_is_refused(scale):
    parts = (torch.zeros(4, dtype=torch.uint8), torch.tensor([scale], dtype=torch.bfloat16))
    with pytest.raises(PayloadError, match="a scale is bad: want 0 <= 448"):
        FP8(block=4).decompress(Payload((4,), parts))


@pytest.mark.parametrize("block", [0, -1, 65537])
def test_a_block_that_cannot_be_meant_is_refused(block):
    with pytest.raises(ConfigError, match="1 to 65536"):
        FP8(block=block)
