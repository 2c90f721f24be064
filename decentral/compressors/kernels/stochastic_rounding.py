"""Uniform numbers for stochastic rounding, drawn from the tensor itself: equal tensors are rounded alike.

A compressor must give the same bits for the same tensor, on any device, or an aborted round could not be repeated; so
there is no generator with a state. The key is a hash of the mantissas of all values and of ``seed``; number i is a
hash of the key and i. What is rounded is therefore unbiased over tensors, not over repetitions of one tensor: a
different pseudo-gradient, by one bit, draws afresh. Signs and exponents stay out of the hash, so that -x and 4 x are
rounded as x is. Peers that want different draws for equal tensors take different seeds.

Whole numbers modulo 2**64 only: the same on every device. The hash is splitmix64's finaliser (Steele et al., "Fast
Splittable Pseudorandom Number Generators", 2014); it is no secret, and whoever knows the tensor knows the rounding.
"""
# Shape suffixes: N = values.

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.tensors.compiled import compiled
from decentral.tensors.device import one_kernel

__all__ = ["Draws", "check_seed", "draws", "key", "uniform"]

Draws = Callable[[int, int], Tensor]  # what `uniform` makes the numbers of the values [start, stop) of

_MANTISSA = (1 << 23) - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_RESOLUTION = 24  # bits of a uniform number: every one is exact in float32


def check_seed(method: object, seed: int) -> None:
    """ConfigError unless a seed has a sensible size."""
    if not 0 <= seed < 2**32:
        raise ConfigError(f"{method}: a seed is a whole number from 0 to 2**32 - 1")


def key(flat_N: Tensor, seed: int) -> Tensor:
    """int64 (): a hash of the mantissas, in their order, and of the seed."""
    if _on_processor(flat_N):
        return torch.tensor(_sum(flat_N.contiguous().numpy().view(np.uint32))).add(_signed(seed * _FIRST))
    return _summed(flat_N.contiguous(), _golden(flat_N.device)) + _signed(seed * _FIRST)


def draws(flat_N: Tensor, seed: int) -> Draws:
    """Numbers in [0, 1), multiples of 2**-24, one for each of the values that they are drawn from, made as needed: on
    the processor at once, elsewhere in the kernel that needs them, which saves it two ways through memory.
    """
    begin = key(flat_N, seed)
    if _on_processor(flat_N):
        return lambda start, stop: _filled(int(begin) + start * _GOLDEN, stop - start)
    golden = _golden(flat_N.device)
    return lambda start, stop: torch.stack([begin + _signed(start * _GOLDEN), golden])


def uniform(drawn: Tensor, like_N: Tensor) -> Tensor:
    """Numbers (N,) in [0, 1): what was drawn, or int64 (2,), of what begins them and what leads on."""
    if drawn.dtype != torch.int64:
        return drawn
    mixed_N = _mixed(drawn[0] + _places(like_N, drawn[1]))
    return (mixed_N >> (64 - _RESOLUTION) & (1 << _RESOLUTION) - 1).float() * 2.0**-_RESOLUTION


def _filled(begin: int, numel: int) -> Tensor:
    found_N = torch.empty(numel, dtype=torch.float32)
    _fill(np.uint64(begin % 2**64), found_N.numpy())
    return found_N


@one_kernel
def _summed(flat_N: Tensor, golden: Tensor) -> Tensor:
    return _mixed((flat_N.view(torch.int32).long() & _MANTISSA) + _places(flat_N, golden)).sum()


def _places(like_N: Tensor, golden: Tensor) -> Tensor:
    return torch.arange(1, like_N.numel() + 1, device=like_N.device) * golden


@functools.cache
def _golden(device: torch.device) -> Tensor:
    """A tensor, because torch's compiler takes a number for a part of an index, and those have 32 bits."""
    return torch.tensor(_signed(_GOLDEN), device=device)


def _mixed(number_N: Tensor) -> Tensor:
    """splitmix64's finaliser on int64, whose products wrap around and whose shifts keep the sign: so it is masked."""
    number_N = (number_N ^ (number_N >> 30 & (1 << 34) - 1)) * _signed(_FIRST)
    number_N = (number_N ^ (number_N >> 27 & (1 << 37) - 1)) * _signed(_SECOND)
    return number_N ^ (number_N >> 31 & (1 << 33) - 1)


def _signed(number: int) -> int:
    """The int64 with the lowest 64 bits of a number."""
    return (number + 2**63) % 2**64 - 2**63


def _on_processor(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


@compiled
def _mix(number):  # type: ignore[no-untyped-def]
    number = (number ^ (number >> np.uint64(30))) * np.uint64(_FIRST)
    number = (number ^ (number >> np.uint64(27))) * np.uint64(_SECOND)
    return number ^ (number >> np.uint64(31))


@compiled
def _sum(bits):  # type: ignore[no-untyped-def]
    total, place = np.uint64(0), np.uint64(0)
    for b in bits:
        place += np.uint64(_GOLDEN)
        total += _mix(place + np.uint64(b & np.uint32(_MANTISSA)))
    return np.int64(total)


@compiled
def _fill(start, numbers):  # type: ignore[no-untyped-def]
    for i in range(numbers.size):
        start += np.uint64(_GOLDEN)
        numbers[i] = np.float32(_mix(start) >> np.uint64(64 - _RESOLUTION)) * np.float32(2.0**-_RESOLUTION)
