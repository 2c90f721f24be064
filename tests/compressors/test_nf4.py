import pytest
import torch

from decentral.compressors import NF4, Int4, Payload
from decentral.errors import ConfigError, PayloadError

# QLoRA, appendix E.
PUBLISHED = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def sent(tensor: torch.Tensor, block: int = 64) -> torch.Tensor:
    return NF4(block=block).decompress(NF4(block=block).compress(tensor))


def test_the_levels_are_the_published_ones():
    codes = torch.arange(16, dtype=torch.uint8)
    back = NF4(block=16).decompress(Payload((16,), (codes, torch.ones(1, dtype=torch.bfloat16))))
    assert torch.allclose(back, torch.tensor(PUBLISHED), rtol=0, atol=2**-17)
    assert torch.equal(NF4(block=16).compress(torch.tensor(PUBLISHED)).parts[0], codes)


def test_every_value_goes_to_the_nearest_level():
    value = torch.linspace(-1, 1, 20001)
    best = (value[:, None] - torch.tensor(PUBLISHED)).abs().amin(dim=1)
    assert torch.allclose((sent(value, 32768) - value).abs(), best, rtol=0, atol=2e-5)


def test_level_times_scale_is_exact_so_that_no_device_rounds_it_differently():
    tensor = gaussian(4096)
    codes, scales = NF4(block=64).compress(tensor).parts
    levels = torch.tensor([round(level * 2**16) / 2**16 for level in PUBLISHED], dtype=torch.float64)
    assert torch.equal(sent(tensor).double(), levels[codes.long()] * scales.double().repeat_interleave(64))


def test_a_gaussian_fills_its_levels_more_evenly_than_those_of_int4():
    tensor = gaussian(64 * 1000)
    fullest = [method.compress(tensor).parts[0].bincount().max() for method in (NF4(block=64), Int4(block=64))]
    assert fullest[0] < 0.1 * tensor.numel() < 0.12 * tensor.numel() < fullest[1]


def test_golden_bytes():
    """These parts are the wire format; a change needs a new frame version."""
    codes, scales = NF4(block=4).compress(torch.tensor([1.0, -1.0, 0.25, 0.0, -8.0])).parts
    assert codes.tolist() == [15, 0, 10, 7, 0]
    assert scales.view(torch.int16).tolist() == [0x3F80, 0x4100]


def test_at_most_4_bits_per_value_and_2_bytes_per_block():
    assert [spec.nbytes for spec in NF4(block=64).layout((129,))] == [65, 6]


@pytest.mark.parametrize("scale", [-1.0, float("inf"), float("nan")])
def test_a_scale_out_of_range_is_refused(scale):
    parts = (torch.zeros(4, dtype=torch.uint8), torch.tensor([scale], dtype=torch.bfloat16))
    with pytest.raises(PayloadError, match="scale"):
        NF4(block=4).decompress(Payload((4,), parts))


@pytest.mark.parametrize("block", [0, -1, 65537])
def test_a_block_that_cannot_be_meant_is_refused(block):
    with pytest.raises(ConfigError, match="1 to 65536"):
        NF4(block=block)
