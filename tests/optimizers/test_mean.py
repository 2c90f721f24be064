"""The step band by band is the mean and a step after it, bit for bit, whatever the number of threads."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from decentral.compressors import Payload, accumulate, parse_compressor
from decentral.compressors.base import AddBand
from decentral.optimizers.mean import mean_of, step_by_bands
from decentral.tensors.threads import on_threads

SHAPES = [(7,), (1100, 1024), (64, 64), (2100, 1024), (2000, 600), (3, 5)]
SIZES = [math.prod(shape) for shape in SHAPES]
TOPK = parse_compressor("topk >> signmag2")
WEIGHTS = (1.0, 0.25, 3.0)


def sent() -> list[list[Payload]]:
    chance = torch.Generator().manual_seed(0)
    return [[TOPK.compress_one(torch.randn(shape, generator=chance)) for shape in SHAPES] for _ in WEIGHTS]


def added(payloads: list[Payload], total_N: Tensor, weight: float) -> None:
    for total, payload in zip(total_N.split_with_sizes(SIZES), payloads, strict=True):
        accumulate(TOPK, total.view(payload.shape), payload, weight)


def opener(payloads: list[Payload]) -> Callable[[slice], Sequence[AddBand]]:
    return lambda these: [decoded.add for decoded in TOPK.decompress(payloads[these])]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_band_by_band_gives_the_bits_of_the_whole(threads: int):
    anchor_N, rows = torch.randn(sum(SIZES), generator=torch.Generator().manual_seed(1)), sent()
    peers = [bytes([9 - number]) for number in range(len(rows))]
    mean_N = mean_of(
        torch.zeros_like(anchor_N),
        [(peer, partial(added, row), weight) for peer, row, weight in zip(peers, rows, WEIGHTS, strict=True)],
    )
    seen: dict[int, int] = {}
    with on_threads(threads):
        made_N = step_by_bands(
            anchor_N,
            [(math.prod(shape), TOPK.band(shape)) for shape in SHAPES],
            [(peer, opener(row), weight) for peer, row, weight in zip(peers, rows, WEIGHTS, strict=True)],
            0.7,
            lambda start, total_n: seen.update({start: len(total_n)}),
        )
    assert made_N is not None
    assert torch.equal(made_N, anchor_N - mean_N * 0.7)
    assert len(seen) > len(SHAPES)  # large tensors came in parts
    assert sorted(seen) == [sum(seen[s] for s in sorted(seen)[:i]) for i in range(len(seen))]
    assert sum(seen.values()) == sum(SIZES)


def test_what_is_beyond_float32_in_any_band_gives_nothing():
    anchor_N = torch.full((sum(SIZES),), 3e38)
    rows = [
        [TOPK.compress_one(torch.full(shape, -3e38 if number == 3 else 1.0)) for number, shape in enumerate(SHAPES)]
    ]
    sizes = [(math.prod(shape), TOPK.band(shape)) for shape in SHAPES]
    assert step_by_bands(anchor_N, sizes, [(b"a", opener(rows[0]), 1.0)], 1.0, lambda start, total_n: None) is None
