"""Numbers that look random, from a counter and a key, the same on every device and in every version of torch.

No generator, no state: the number at a place is a hash of the place. Products stay below 2**63 in magnitude, so
nothing here overflows, and nothing here rounds.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011 (counters in place of state); the mixing
function is "lowbias32" (Wellons, "Prospecting for Hash Functions", 2018).
"""

import torch
from torch import Tensor

__all__ = ["below", "hash32", "nonce_of"]

_MASK = (1 << 32) - 1
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - (1 << 32)  # the second less 2**32: the same low bits, a smaller product
_GOLDEN = 0x9E3779B1
_LINE = 1024  # values in one sum
_SLAB = 1 << 18  # values at a time, so that what they become stays in cache
_ZERO = 1 << 24  # no other value is this far above the largest one's exponent


def hash32(number: Tensor) -> Tensor:
    """int64 in [0, 2**32) to int64 in [0, 2**32), one to one."""
    mixed = ((number ^ (number >> 16)) * _FIRST) & _MASK
    mixed = ((mixed ^ (mixed >> 15)) * _SECOND) & _MASK
    return mixed ^ (mixed >> 16)


def below(number: Tensor, limit: Tensor | int) -> Tensor:
    """int64 in [0, 2**32) to int64 in [0, limit), evenly to within limit / 2**32; ``limit`` up to 2**31."""
    return (number * limit) >> 32


def nonce_of(flat_N: Tensor) -> Tensor:
    """uint8 (8,): a fingerprint of finite float32 values, the same for ``-x``, ``4 * x`` and on every device."""
    exponent = flat_N.abs().amax().view(torch.int32) >> 23 << 23  # scaling by a power of two moves all of them alike
    sum_2 = torch.zeros(2, dtype=torch.int64, device=flat_N.device)
    for start in range(0, flat_N.numel(), _SLAB):  # sums of integers: their order does not matter
        line_R = _lines(flat_N[start : start + _SLAB], exponent)
        place_R = torch.arange(line_R.numel(), device=flat_N.device) + start // _LINE
        mixed_R = hash32(hash32(line_R & _MASK) ^ (line_R >> 32 & _MASK) ^ (place_R & _MASK))
        sum_2 += torch.stack([mixed_R.sum(), hash32(mixed_R ^ _GOLDEN).sum()])
    word_2 = hash32(sum_2 & _MASK)
    return torch.stack([(word >> shift) & 255 for word in word_2.unbind() for shift in (0, 8, 16, 24)]).to(torch.uint8)


def _lines(flat_N: Tensor, exponent: Tensor) -> Tensor:
    """int64 (R,): a weighted sum of the bits of each run of 1024 values; below 2**31 * 2**21 * 2**10."""
    bits_N = flat_N.abs().view(torch.int32)
    bits_N = torch.where(bits_N > 0, bits_N - exponent, _ZERO)
    bits_RL = torch.nn.functional.pad(bits_N, (0, -flat_N.numel() % _LINE)).view(-1, _LINE)
    weight_L = hash32(torch.arange(1, _LINE + 1, device=flat_N.device)) >> 11
    return (bits_RL * weight_L).sum(dim=1)
