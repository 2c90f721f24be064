import pytest
import torch

from decentral.compressors import Int4, Payload
from decentral.errors import ConfigError, PayloadError


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_no_value_is_off_by_more_than_half_a_step_of_its_block():
    tensor = gaussian(1000) * torch.logspace(-6, 6, 1000)
    payload = Int4(block=10).compress(tensor)
    step = payload.parts[1].float().repeat_interleave(10)
    lost = (Int4(block=10).decompress(payload) - tensor).abs()
    assert (lost <= step / 2 * (1 + 1e-6)).all()
    assert (lost <= tensor.abs()).all()
    assert (step <= tensor.view(-1, 10).abs().amax(1).repeat_interleave(10) / 7 * (1 + 1 / 128)).all()


def test_whole_numbers_up_to_7_are_exact():
    tensor = torch.arange(-7.0, 8.0)
    assert torch.equal(Int4(block=16).decompress(Int4(block=16).compress(tensor)), tensor)


def test_at_most_4_bits_per_value_and_2_bytes_per_block():
    assert [spec.nbytes for spec in Int4(block=256).layout((513,))] == [257, 6]


def test_golden_bytes():
    """These parts are the wire format; a change needs a new frame version."""
    codes, scales = Int4(block=4).compress(torch.tensor([7.0, -1.0, 0.4, 2.5, -14.0])).parts
    assert codes.tolist() == [15, 7, 8, 10, 1]
    assert scales.view(torch.int16).tolist() == [0x3F80, 0x4000]


@pytest.mark.parametrize("scale", [-1.0, 1e38, float("inf"), float("nan")])
def test_a_scale_that_is_negative_or_would_overflow_is_refused(scale):
    parts = (torch.ones(4, dtype=torch.uint8), torch.tensor([scale], dtype=torch.bfloat16))
    with pytest.raises(PayloadError, match="a scale is bad: want 0 <= 7"):
        Int4(block=4).decompress(Payload((4,), parts))


@pytest.mark.parametrize(("code", "rule"), [(0, "code 0 is not used"), (16, "codes must be below 16")])
def test_codes_without_a_meaning_are_refused(code, rule):
    parts = (torch.full((4,), code, dtype=torch.uint8), torch.ones(1, dtype=torch.bfloat16))
    with pytest.raises(PayloadError, match=rule):
        Int4(block=4).decompress(Payload((4,), parts))


@pytest.mark.parametrize("block", [0, -1, 65537])
def test_a_block_that_cannot_be_meant_is_refused(block):
    with pytest.raises(ConfigError, match="1 to 65536"):
        Int4(block=block)
