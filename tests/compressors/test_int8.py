import pytest
import torch

from decentral.compressors import Int8, Payload
from decentral.errors import ConfigError, PayloadError


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_no_value_is_off_by_more_than_half_a_step_of_its_block():
    tensor = gaussian(1000) * torch.logspace(-6, 6, 1000)
    payload = Int8(block=10).compress(tensor)
    step = payload.parts[1].repeat_interleave(10)
    assert ((Int8(block=10).decompress(payload) - tensor).abs() <= step / 2 * (1 + 1e-6)).all()
    assert (step <= tensor.view(-1, 10).abs().amax(1).repeat_interleave(10) / 127 * (1 + 1 / 128)).all()


def test_whole_numbers_up_to_127_are_exact():
    tensor = torch.arange(-127.0, 128.0)
    assert torch.equal(Int8(block=256).decompress(Int8(block=256).compress(tensor)), tensor)


def test_code_times_scale_is_exact_so_that_no_device_rounds_it_differently():
    payload = Int8(block=64).compress(gaussian(4096))
    code, scale = payload.parts
    exact = (code.double() - 128) * scale.double().repeat_interleave(64)
    assert torch.equal(Int8(block=64).decompress(payload).double(), exact)


def test_an_outlier_spoils_only_its_own_block():
    tensor = gaussian(512)
    tensor[0] = 1e6
    lost = Int8(block=256).decompress(Int8(block=256).compress(tensor)) - tensor
    assert float(lost[256:].abs().max()) < 0.02


def test_it_costs_at_most_a_byte_per_value_and_4_per_block():
    assert [spec.nbytes for spec in Int8(block=4096).layout((4097,))] == [4097, 8]


def test_golden_bytes():
    """These parts are the wire format; a change needs a new frame version."""
    codes, scales = Int8(block=2).compress(torch.tensor([127.0, -1.0, 0.0])).parts
    assert codes.tolist() == [255, 127, 128]
    assert scales.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("scale", [-1.0, 3e38, float("inf"), float("nan")])
def test_a_scale_that_is_negative_or_would_overflow_is_refused(scale):
    with pytest.raises(PayloadError, match="scale"):
        Int8(block=4).decompress(Payload((4,), (torch.ones(4, dtype=torch.uint8), torch.tensor([scale]))))


def test_code_0_is_refused():
    with pytest.raises(PayloadError, match="code 0"):
        Int8(block=4).decompress(Payload((4,), (torch.full((4,), 0, dtype=torch.uint8), torch.ones(1))))


@pytest.mark.parametrize("block", [0, -1, 65537, 10**30])
def test_a_block_that_cannot_be_meant_is_refused(block):
    with pytest.raises(ConfigError, match="1 to 65536"):
        Int8(block=block)
