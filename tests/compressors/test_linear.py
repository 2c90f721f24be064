"""The loop for the processor and the torch code for every other device say the same, to the bit."""

import pytest
import torch

from decentral.compressors import E3M0, Int4, Int8, Payload, blocks
from decentral.errors import NonFiniteError, PayloadError


def gaussian(numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(0))


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
    slow, fast = blocks.Tabled.compress(method, TENSORS[name]), method.compress(TENSORS[name])
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(slow.parts, fast.parts, strict=True))


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("method", [Int8(7), Int8(4096), Int4(64), E3M0(256), E3M0(5)], ids=str)
def test_both_ways_of_decoding_give_the_same_bits(name: str, method, monkeypatch: pytest.MonkeyPatch):
    payload = method.compress(TENSORS[name])
    fast = method.decompress(payload)
    monkeypatch.setattr(blocks, "_on_processor", lambda tensor: False)
    slow = method.decompress(payload)
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
    assert Two().decompress(Payload((100,), (codes, Two.scales))).tolist() == [0.0] * 100
    for place in (0, 50, 99):
        for code in (0, 2, 255):
            bad = codes.clone()
            bad[place] = code
            with pytest.raises(PayloadError, match="it: no such code"):
                Two().decompress(Payload((100,), (bad, Two.scales)))
            with pytest.raises(PayloadError, match="it: no such code"):
                Two().accumulate(total, Payload((100,), (bad, Two.scales)), 1.0)
    assert total.tolist() == [1.0] * 100


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf")])
def test_the_loop_finds_what_is_not_finite_in_every_block(bad: float):
    for place in range(20):
        tensor = gaussian(20)
        tensor[place] = bad
        with pytest.raises(NonFiniteError, match=r"shape \(20,\)"):
            Int8(block=7).compress(tensor)
