import pytest
import torch

from decentral.compressors import Payload, Sign
from decentral.errors import ConfigError, PayloadError


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def sent(tensor: torch.Tensor, block: int) -> torch.Tensor:
    return Sign(block=block).decompress(Sign(block=block).compress(tensor))


def test_a_value_arrives_as_its_sign_times_the_mean_magnitude_of_its_block():
    assert sent(torch.tensor([1.0, -2.0, 6.0, -0.5, 0.25, 0.0]), 3).tolist() == [3.0, -3.0, 3.0, -0.25, 0.25, 0.25]


def test_a_short_last_block_has_the_mean_of_its_own_values():
    assert sent(torch.full((5,), 3.0), 4).tolist() == [3.0] * 5


def test_what_is_lost_is_what_the_formula_says():
    """|x|**2 - (sum of |x|)**2 / block, up to the scale's 8 bits."""
    tensor = gaussian(10, 100).double()
    lost = (sent(tensor.float().flatten(), 100).view(10, 100).double() - tensor).square().sum(1)
    wanted = tensor.square().sum(1) - tensor.abs().sum(1).square() / 100
    assert (lost >= wanted * (1 - 1e-6)).all()
    assert (lost <= wanted + tensor.abs().sum(1).square() / 100 * 2**-14).all()


def test_no_other_scale_of_8_bits_loses_clearly_less():
    tensor = gaussian(1024)
    least = float((sent(tensor, 1024) - tensor).square().sum())
    for scale in torch.linspace(0.5, 1.2, 71):
        assert least <= float((tensor.sign() * scale - tensor).square().sum()) * (1 + 1e-4)


def test_minus_zero_counts_as_negative_so_that_the_mirrored_tensor_arrives_mirrored():
    tensor = torch.tensor([0.0, -0.0, 5.0, -1.0])
    assert torch.equal(sent(-tensor, 4), -sent(tensor, 4))


def test_1_bit_per_value_and_2_bytes_per_block():
    assert [spec.nbytes for spec in Sign(block=1024).layout((1025,))] == [129, 4]


def test_golden_bytes():
    """These parts are the wire format; a change needs a new frame version."""
    codes, scales = Sign(block=4).compress(torch.tensor([1.0, -0.5, 0.25, 0.0, -8.0])).parts
    assert codes.tolist() == [0, 1, 0, 0, 1]
    assert scales.view(torch.int16).tolist() == [0x3EE0, 0x4100]


@pytest.mark.parametrize("scale", [-1.0, float("inf"), float("nan")])
def test_a_scale_out_of_range_is_refused(scale):
    parts = (torch.zeros(4, dtype=torch.uint8), torch.tensor([scale], dtype=torch.bfloat16))
    with pytest.raises(PayloadError, match="scale"):
        Sign(block=4).decompress(Payload((4,), parts))


def test_a_code_beyond_1_bit_is_refused():
    parts = (torch.tensor([0, 2], dtype=torch.uint8), torch.ones(1, dtype=torch.bfloat16))
    with pytest.raises(PayloadError, match="codes must be below 2"):
        Sign(block=4).decompress(Payload((2,), parts))


@pytest.mark.parametrize("block", [0, -1, 65537])
def test_a_block_that_cannot_be_meant_is_refused(block):
    with pytest.raises(ConfigError, match="1 to 65536"):
        Sign(block=block)
