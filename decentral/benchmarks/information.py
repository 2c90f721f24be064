"""How few bits the parts of a payload could take: what an ideal code needs that knows how often each symbol comes."""

from collections.abc import Sequence
from math import lgamma, log, prod

import numpy as np

from decentral import coding
from decentral.compressors import Compressor, PartSpec, Payload
from decentral.wire.body import to_array

__all__ = ["information_bits"]


def information_bits(compressor: Compressor, payloads: Sequence[Payload]) -> float:
    """Bits in all. Symbols count by their empirical entropy over all parts of one name; rising indices by the
    logarithm of the number of subsets; sign and mantissa of floats in full.
    """
    named: dict[str, list[tuple[PartSpec, np.ndarray[tuple[int, ...], np.dtype[np.generic]]]]] = {}
    for payload in payloads:
        for spec, part in zip(compressor.layout(payload.shape), payload.parts, strict=True):
            named.setdefault(spec.name, []).append((spec, to_array(part)))
    return sum(_of_one_name(members) for members in named.values())


def _of_one_name(members: list[tuple[PartSpec, np.ndarray[tuple[int, ...], np.dtype[np.generic]]]]) -> float:
    bits, symbols = 0.0, []
    for spec, array in members:
        if isinstance(spec.kind, coding.Rising):
            rows, columns = prod(spec.shape[:-1]), spec.shape[-1]
            bits += rows * _log2_subsets(spec.kind.limit, columns)
            continue
        codes, _ = spec.kind.to_symbols(array)
        symbols.append(codes)
        bits += 8 * spec.kind.side_nbytes(codes, array.dtype.itemsize)
    return bits + (_entropy_bits(np.concatenate(symbols)) if symbols else 0.0)


def _entropy_bits(symbols: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> float:
    count = np.bincount(symbols, minlength=1)
    count = count[count > 0]
    return float(-(count * np.log2(count / max(1, symbols.size))).sum())


def _log2_subsets(limit: int, columns: int) -> float:
    return (lgamma(limit + 1) - lgamma(columns + 1) - lgamma(limit - columns + 1)) / log(2)
