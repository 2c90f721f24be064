import pytest
import torch

from decentral.compressors import E3M0, Payload
from decentral.errors import ConfigError, PayloadError


def sent(tensor: torch.Tensor, block: int = 256) -> torch.Tensor:
    return E3M0(block=block).decompress(E3M0(block=block).compress(tensor))


def test_the_levels_are_zero_and_seven_powers_of_two_with_both_signs():
    levels = torch.tensor([0.0, *(2.0**-e for e in range(7))])
    both = torch.cat([levels, -levels])
    assert torch.equal(sent(both), both)


def test_every_value_goes_to_the_nearest_level():
    value = torch.linspace(-1, 1, 20001)
    levels = torch.tensor([0.0, *(sign * 2.0**-e for e in range(7) for sign in (1, -1))])
    best = (value[:, None] - levels).abs().amin(dim=1)
    assert torch.allclose((sent(value, block=32768) - value).abs(), best, rtol=0, atol=1e-6)


def test_at_most_4_bits_per_value_and_2_bytes_per_block():
    assert [spec.nbytes for spec in E3M0(block=256).layout((513,))] == [257, 6]


def test_golden_bytes():
    """These parts are the wire format; a change needs a new frame version."""
    codes, scales = E3M0(block=4).compress(torch.tensor([1.0, -0.5, 0.25, 0.0, -8.0])).parts
    assert codes.tolist() == [7, 6 + 8, 5, 0, 7 + 8]
    assert scales.view(torch.int16).tolist() == [0x3F80, 0x4100]


@pytest.mark.parametrize("scale", [-1.0, float("inf"), float("nan")])
def test_a_scale_out_of_range_is_refused(scale):
    parts = (torch.zeros(4, dtype=torch.uint8), torch.tensor([scale], dtype=torch.bfloat16))
    with pytest.raises(PayloadError, match="scale"):
        E3M0(block=4).decompress(Payload((4,), parts))


def test_minus_zero_and_codes_beyond_4_bits_are_refused():
    scale = torch.ones(1, dtype=torch.bfloat16)
    with pytest.raises(PayloadError, match="minus zero"):
        E3M0(block=4).decompress(Payload((3,), (torch.tensor([8, 0, 0], dtype=torch.uint8), scale)))
    with pytest.raises(PayloadError, match="codes must be below 16"):
        E3M0(block=4).decompress(Payload((3,), (torch.tensor([0, 16, 0], dtype=torch.uint8), scale)))


@pytest.mark.parametrize("block", [0, -1, 65537])
def test_a_block_that_cannot_be_meant_is_refused(block):
    with pytest.raises(ConfigError, match="1 to 65536"):
        E3M0(block=block)
