"""Codes of 2, 4 and 12 bits packed into bytes, and back. Vectorised, on the device of the input.

The first code lies in the lowest bits. What is left over in the last byte is zero, and is checked: there is one
spelling for every list of codes.
"""

import torch
from torch import Tensor

from decentral.compressors.base import require

__all__ = ["pack", "pack12", "packed_nbytes", "unpack", "unpack12"]


def packed_nbytes(num_codes: int, bits: int) -> int:
    """Bytes that hold ``num_codes`` codes of ``bits`` bits each."""
    return (num_codes * bits + 7) // 8


def pack(code_N: Tensor, bits: int) -> Tensor:
    """uint8 codes below 2**bits (2 or 4 bits) -> uint8, 8 // bits of them in a byte."""
    per_byte = 8 // bits
    missing = -code_N.numel() % per_byte
    if missing:
        code_N = torch.nn.functional.pad(code_N, (0, missing))
    columns: tuple[Tensor, ...] = code_N.reshape(-1, per_byte).unbind(1)
    packed = columns[0].clone()
    for place, column in enumerate(columns[1:], start=1):  # 1 or 3 columns, whatever N is
        packed |= column << (bits * place)
    return packed


def unpack(packed: Tensor, bits: int, num_codes: int, method: object) -> Tensor:
    """The inverse of `pack`, uint8 (num_codes,); PayloadError when left-over bits are set."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    code: Tensor = ((packed[:, None] >> shifts) & (2**bits - 1)).flatten()
    require((code[num_codes:] == 0).all(), method, "the bits after the last code must be zero")
    return code[:num_codes]


def pack12(code_N: Tensor) -> Tensor:
    """Integer codes below 4096 -> uint8, two in three bytes: low byte, high nibble | low nibble, high byte."""
    num_codes = code_N.numel()
    if num_codes % 2:
        code_N = torch.nn.functional.pad(code_N, (0, 1))
    first, second = code_N.to(torch.int32).reshape(-1, 2).unbind(1)
    triple = torch.stack([first & 255, (first >> 8) | ((second & 15) << 4), second >> 4], dim=1)
    return triple.to(torch.uint8).flatten()[: packed_nbytes(num_codes, 12)]


def unpack12(packed: Tensor, num_codes: int, method: object) -> Tensor:
    """The inverse of `pack12`, int64 (num_codes,); PayloadError when the left-over nibble is set."""
    if num_codes % 2:
        packed = torch.nn.functional.pad(packed, (0, 1))
    low, middle, high = packed.to(torch.int64).reshape(-1, 3).unbind(1)
    code = torch.stack([low | ((middle & 15) << 8), (middle >> 4) | (high << 4)], dim=1).flatten()
    require((code[num_codes:] == 0).all(), method, "the bits after the last index must be zero")
    return code[:num_codes]
