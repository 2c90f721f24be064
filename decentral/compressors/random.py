"""Numbers that look random, the same on every device and in every version of torch: hashes, without any state."""

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.tensors.compiled import compiled
from decentral.tensors.device import one_kernel

__all__ = ["Draws", "below", "check_seed", "draws", "hash32", "key", "nonce_of", "uniform"]

# ---- hashes of 32 bits, in place of a generator ----
#
# The number at a place is a hash of the place. Products stay below 2**63 in magnitude, so nothing here overflows, and
# nothing here rounds.
#
# Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011 (counters in place of state); the mixing
# function is "lowbias32" (Wellons, "Prospecting for Hash Functions", 2018).

_MASK = (1 << 32) - 1
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - (1 << 32)  # the second less 2**32: the same low bits, a smaller product
_GOLDEN = 0x9E3779B1
_LINE = 1024  # values in one sum
_SLAB = 1 << 18  # values at a time, so that what they become stays in cache
_ZERO = 1 << 24  # no other value is this far above the largest one's exponent


def hash32(number: Tensor) -> Tensor:
    """Map int64 in [0, 2**32) to int64 in [0, 2**32), one to one."""
    mixed = ((number ^ (number >> 16)) * _FIRST) & _MASK
    mixed = ((mixed ^ (mixed >> 15)) * _SECOND) & _MASK
    return mixed ^ (mixed >> 16)


def below(number: Tensor, limit: Tensor | int) -> Tensor:
    """Map int64 in [0, 2**32) to int64 in [0, limit), evenly to within limit / 2**32; ``limit`` up to 2**31."""
    return (number * limit) >> 32


def nonce_of(flat_N: Tensor) -> Tensor:
    """Return uint8 (8,): a fingerprint of finite float32 values, the same for ``-x``, ``4 * x`` and on every device."""
    exponent = flat_N.abs().amax().view(torch.int32) >> 23 << 23  # scaling by a power of two moves all of them alike
    sum_2 = torch.zeros(2, dtype=torch.int64, device=flat_N.device)
    for start in range(0, flat_N.numel(), _SLAB):  # sums of integers: their order does not matter
        line_R = _lines(flat_N[start : start + _SLAB], exponent)
        place_R = torch.arange(line_R.numel(), dtype=torch.int64, device=flat_N.device) + start // _LINE
        mixed_R = hash32(hash32(line_R & _MASK) ^ (line_R >> 32 & _MASK) ^ (place_R & _MASK))
        sum_2 += torch.stack([mixed_R.sum(), hash32(mixed_R ^ _GOLDEN).sum()])
    word_2 = hash32(sum_2 & _MASK)
    return torch.stack([(word >> shift) & 255 for word in word_2.unbind() for shift in (0, 8, 16, 24)]).to(torch.uint8)


def _lines(flat_N: Tensor, exponent: Tensor) -> Tensor:
    """Return int64 (R,): a weighted sum of the bits of each run of 1024 values; below 2**31 * 2**21 * 2**10."""
    bits_N = flat_N.abs().view(torch.int32)
    bits_N = torch.where(bits_N > 0, bits_N - exponent, _ZERO)
    bits_RL = torch.nn.functional.pad(bits_N, (0, -flat_N.numel() % _LINE)).view(-1, _LINE)
    weight_L = hash32(torch.arange(1, _LINE + 1, dtype=torch.int64, device=flat_N.device)) >> 11
    return (bits_RL * weight_L).sum(dim=1)


# ---- uniform numbers for stochastic rounding ----
#
# Drawn from the tensor itself: equal tensors are rounded alike.
#
# A compressor must give the same bits for the same tensor, on any device, or an aborted round could not be repeated.
# The key is a hash of the mantissas of all values and of ``seed``; number i is a hash of the key and i. What is rounded
# is therefore unbiased over tensors, not over repetitions of one tensor: a different pseudo-gradient, by one bit, draws
# afresh. Signs and exponents stay out of the hash, so that -x and 4 x are rounded as x is. Peers that want different
# draws for equal tensors take different seeds.
#
# Whole numbers modulo 2**64 only. The hash is splitmix64's finaliser (Steele et al., "Fast Splittable Pseudorandom
# Number Generators", 2014); it is no secret, and whoever knows the tensor knows the rounding.
#
# Shape suffixes: N = values.

Draws = Callable[[int, int], Tensor]  # what `uniform` makes the numbers of the values [start, stop) of

_MANTISSA = (1 << 23) - 1
_GOLDEN_64, _FIRST_64, _SECOND_64 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_RESOLUTION = 24  # bits of a uniform number: every one is exact in float32


def check_seed(method: object, seed: int) -> None:
    """Raise ConfigError unless a seed has a sensible size."""
    if not 0 <= seed < 2**32:
        raise ConfigError(f"{method}: a seed is a whole number from 0 to 2**32 - 1")


def key(flat_N: Tensor, seed: int) -> Tensor:
    """Return int64 (): a hash of the mantissas, in their order, and of the seed."""
    if _on_processor(flat_N):
        found = torch.tensor(_sum(flat_N.contiguous().numpy().view(np.uint32)), dtype=torch.int64, device="cpu")
        return found.add(_to_int64(seed * _FIRST_64))
    return _checksum(flat_N.contiguous(), _golden(flat_N.device)) + _to_int64(seed * _FIRST_64)


def draws(flat_N: Tensor, seed: int) -> Draws:
    """Return numbers in [0, 1), multiples of 2**-24, one for each of the values that they are drawn from, made as
    needed: on the processor at once, elsewhere in the kernel that needs them, which saves it two ways through memory.
    """
    begin = key(flat_N, seed)
    if _on_processor(flat_N):
        return lambda start, stop: _fill_new(int(begin) + start * _GOLDEN_64, stop - start)
    golden = _golden(flat_N.device)
    return lambda start, stop: torch.stack([begin + _to_int64(start * _GOLDEN_64), golden])


def uniform(drawn: Tensor, like_N: Tensor) -> Tensor:
    """Return numbers (N,) in [0, 1): what was drawn, or int64 (2,), of what begins them and what leads on."""
    if drawn.dtype != torch.int64:
        return drawn
    mixed_N = _mix64(drawn[0] + _places(like_N, drawn[1]))
    return (mixed_N >> (64 - _RESOLUTION) & (1 << _RESOLUTION) - 1).float() * 2.0**-_RESOLUTION


def _fill_new(begin: int, numel: int) -> Tensor:
    found_N = torch.empty(numel, dtype=torch.float32, device="cpu")
    _fill(np.uint64(begin % 2**64), found_N.numpy())
    return found_N


@one_kernel
def _checksum(flat_N: Tensor, golden: Tensor) -> Tensor:
    return _mix64((flat_N.view(torch.int32).long() & _MANTISSA) + _places(flat_N, golden)).sum()


def _places(like_N: Tensor, golden: Tensor) -> Tensor:
    return torch.arange(1, like_N.numel() + 1, dtype=torch.int64, device=like_N.device) * golden


@functools.cache
def _golden(device: torch.device) -> Tensor:
    """Return a tensor, because torch's compiler takes a number for a part of an index, and those have 32 bits."""
    return torch.tensor(_to_int64(_GOLDEN_64), dtype=torch.int64, device=device)


def _mix64(number_N: Tensor) -> Tensor:
    """Apply splitmix64's finaliser on int64, whose products wrap around and whose shifts keep the sign: so it is
    masked.
    """
    number_N = (number_N ^ (number_N >> 30 & (1 << 34) - 1)) * _to_int64(_FIRST_64)
    number_N = (number_N ^ (number_N >> 27 & (1 << 37) - 1)) * _to_int64(_SECOND_64)
    return number_N ^ (number_N >> 31 & (1 << 33) - 1)


def _to_int64(number: int) -> int:
    """Return the int64 with the lowest 64 bits of a number."""
    return (number + 2**63) % 2**64 - 2**63


def _on_processor(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


@compiled
def _mix(number):  # type: ignore[no-untyped-def]
    number = (number ^ (number >> np.uint64(30))) * np.uint64(_FIRST_64)
    number = (number ^ (number >> np.uint64(27))) * np.uint64(_SECOND_64)
    return number ^ (number >> np.uint64(31))


@compiled
def _sum(bits):  # type: ignore[no-untyped-def]
    total, place = np.uint64(0), np.uint64(0)
    for b in bits:
        place += np.uint64(_GOLDEN_64)
        total += _mix(place + np.uint64(b & np.uint32(_MANTISSA)))
    return np.int64(total)


@compiled
def _fill(start, numbers):  # type: ignore[no-untyped-def]
    for i in range(numbers.size):
        start += np.uint64(_GOLDEN_64)
        numbers[i] = np.float32(_mix(start) >> np.uint64(64 - _RESOLUTION)) * np.float32(2.0**-_RESOLUTION)
