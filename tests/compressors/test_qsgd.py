import pytest
import torch

from decentral.compressors import QSGD, Payload
from decentral.errors import ConfigError, PayloadError


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_a_value_goes_to_one_of_its_two_neighbours():
    method, tensor = QSGD(levels=7, block=10), gaussian(1000)
    payload = method.compress(tensor)
    scale = payload.parts[1].float().repeat_interleave(10)
    assert ((method.decompress(payload) - tensor).abs() <= scale).all()


@pytest.mark.parametrize(("number", "level"), [(0.0, 3), (0.249, 3), (0.25, 2), (0.999, 2)])
def test_it_goes_up_when_its_number_is_below_the_distance_from_the_lower_level(number: float, level: int):
    tensor = torch.tensor([7.0, 2.25, -2.25])
    codes = QSGD(levels=7, block=4).compress_with(tensor, torch.full((3,), number)).parts[0]
    assert codes.tolist() == [14, 7 + level, 7 - level]


def test_values_on_a_level_never_move():
    method, tensor = QSGD(levels=7, block=16), torch.arange(-7.0, 8.0)
    for number in (0.0, 0.5, 1 - 2**-24):
        assert torch.equal(method.decompress(method.compress_with(tensor, torch.full((15,), number))), tensor)


def test_another_seed_or_another_bit_of_the_tensor_rounds_otherwise():
    tensor = gaussian(1000)
    first = QSGD(seed=0).compress(tensor).parts[0]
    assert not torch.equal(first, QSGD(seed=1).compress(tensor).parts[0])
    tensor[500] = torch.nextafter(tensor[500], torch.tensor(9.0))
    assert int((first != QSGD(seed=0).compress(tensor).parts[0]).sum()) > 50


@pytest.mark.parametrize(("levels", "bits"), [(1, 2), (3, 3), (7, 4), (8, 5), (127, 8)])
def test_codes_have_as_many_bits_as_the_levels_need(levels: int, bits: int):
    assert QSGD(levels=levels).layout((8,))[0].nbytes == bits


def test_golden_bytes():
    """These parts are the wire format; a change needs a new frame version. Rounding may change without one."""
    codes, scales = QSGD(levels=7, block=4).compress(torch.tensor([7.0, -1.0, 0.0, 3.0, -14.0])).parts
    assert codes.tolist() == [14, 6, 7, 10, 0]
    assert scales.view(torch.int16).tolist() == [0x3F80, 0x4000]


def test_a_code_above_twice_the_levels_is_refused():
    parts = (torch.tensor([0, 15], dtype=torch.uint8), torch.ones(1, dtype=torch.bfloat16))
    with pytest.raises(PayloadError, match="codes must be at most 14"):
        QSGD(levels=7, block=4).decompress(Payload((2,), parts))


@pytest.mark.parametrize("scale", [-1.0, 1e38, float("inf"), float("nan")])
def test_a_scale_that_is_negative_or_would_overflow_is_refused(scale):
    parts = (torch.zeros(4, dtype=torch.uint8), torch.tensor([scale], dtype=torch.bfloat16))
    with pytest.raises(PayloadError, match="a scale is bad: want 0 <= 7"):
        QSGD(levels=7, block=4).decompress(Payload((4,), parts))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"levels": 0}, "levels must be 1 to 127"),
        ({"levels": 128}, "levels must be 1 to 127"),
        ({"block": 0}, "1 to 65536"),
        ({"seed": -1}, "a seed is"),
        ({"seed": 2**32}, "a seed is"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        QSGD(**arguments)
