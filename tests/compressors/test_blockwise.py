"""Methods that give a block of values one scale: whose levels they are, and both ways of computing them."""

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
from decentral.errors import NonFiniteError, PayloadError


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_the_table_is_torchs_own_float8_e4m3fn():
    used = [code for code in range(256) if code not in (0x7F, 0x80, 0xFF)]
    codes = torch.tensor(used, dtype=torch.uint8)
    parts = (codes, torch.ones(1, dtype=torch.bfloat16))
    back = FP8(block=256).decompress_one(Payload((253,), parts))
    assert torch.equal(back, codes.view(torch.float8_e4m3fn).float())


def test_small_values_beside_a_large_one_keep_their_digits_where_int8_has_none():
    tensor = gaussian(256)
    tensor[0] = 1000.0
    lost = {
        method: method.decompress_one(method.compress_one(tensor))[1:] - tensor[1:] for method in (FP8(256), Int8(256))
    }
    assert float(lost[FP8(256)].norm()) < 0.1 * float(lost[Int8(256)].norm())


# ---- the loop for the processor and the torch code for every other device say the same, to the bit ----


TENSORS = {
    "gaussian": gaussian(20_011),
    "ties": torch.arange(-254.0, 255.0) / 2,
    "every magnitude": torch.logspace(-45, 38, 9001, dtype=torch.float64).float() * gaussian(9001).sign(),
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
        tensor = gaussian(20)
        tensor[place] = bad
        with pytest.raises(NonFiniteError, match=r"shape \(20,\)"):
            Int8(block=7).compress_one(tensor)


# QLoRA, appendix E.
PUBLISHED = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]


def test_the_levels_are_the_published_ones():
    codes = torch.arange(16, dtype=torch.uint8)
    back = NF4(block=16).decompress_one(Payload((16,), (codes, torch.ones(1, dtype=torch.bfloat16))))
    assert torch.allclose(back, torch.tensor(PUBLISHED), rtol=0, atol=2**-17)
    assert torch.equal(NF4(block=16).compress_one(torch.tensor(PUBLISHED)).parts[0], codes)


def test_a_gaussian_fills_its_levels_more_evenly_than_those_of_int4():
    tensor = gaussian(64 * 1000)
    fullest = [method.compress_one(tensor).parts[0].bincount().max() for method in (NF4(block=64), Int4(block=64))]
    assert fullest[0] < 0.1 * tensor.numel() < 0.12 * tensor.numel() < fullest[1]


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
