import pytest
import torch

from decentral.compressors.packing import pack, pack12, packed_nbytes, unpack, unpack12
from decentral.errors import PayloadError


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 63, 64, 1001])
@pytest.mark.parametrize("bits", [2, 4])
def test_any_number_of_short_codes_comes_back(count: int, bits: int):
    codes = torch.randint(0, 2**bits, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    packed = pack(codes, bits)
    assert packed.numel() == packed_nbytes(count, bits)
    assert torch.equal(unpack(packed, bits, count, "test"), codes)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 63, 64, 1001])
def test_any_number_of_12_bit_codes_comes_back(count: int):
    codes = torch.randint(0, 4096, (count,), generator=torch.Generator().manual_seed(0))
    packed = pack12(codes)
    assert packed.numel() == -(-3 * count // 2)
    assert torch.equal(unpack12(packed, count, "test"), codes)


def test_two_12_bit_codes_lie_in_three_bytes_lowest_bits_first():
    assert bytes(pack12(torch.tensor([0xABC, 0x123])).tolist()).hex() == "bc3a12"


def test_left_over_bits_must_be_zero():
    for bits, count in [(2, 1), (2, 3), (4, 1)]:
        with pytest.raises(PayloadError, match="after the last code"):
            unpack(torch.tensor([0x80], dtype=torch.uint8), bits, count, "test")
    with pytest.raises(PayloadError, match="after the last index"):
        unpack12(torch.tensor([0, 0x10], dtype=torch.uint8), 1, "test")
