"""The order in which a framework's loader draws its data: another one on every peer, without a setting.

Peers that hold the same data and leave the seed at its default would draw the same batches, and do the work of one.
"""

from __future__ import annotations

from typing import Any

from accelerate.data_loader import SeedableRandomSampler

_MOST = 2**62  # an epoch is added to the seed, which has to stay below 2**63


def draw_in_own_order(loader: Any, seed: int) -> bool:  # Any: accelerate's loaders have no type
    """Shuffle by ``seed`` besides the seed that the loader has, which is the same on all processes of a peer.

    False where the loader draws otherwise: in the order of the data, by a stream, by a sampler of one's own.
    """
    sampler = loader
    while sampler is not None and not isinstance(sampler, SeedableRandomSampler):  # of processes, of batches, of items
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
    if sampler is None:
        return False
    sampler.initial_seed = (sampler.initial_seed + seed) % _MOST
    return True
