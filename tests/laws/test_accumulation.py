"""Adding what arrives: the same bits as decoding first, and the same aggregate in any order of arrival."""

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from decentral.compressors import Compressor, accumulate
from decentral.optimizers.mean import mean_of, mean_pseudo_gradient
from decentral.replica.codec import Codec
from tests.laws.shapes import for_every_shape

SHAPE = (67, 131)


@pytest.mark.parametrize("weight", [-1.0, 0.3])
@for_every_shape
def test_adding_gives_the_bits_of_decoding_and_then_adding(
    compressor: Compressor, shape: tuple[int, ...], gaussian: Callable[..., Tensor], weight: float
):
    payload, total = compressor.compress_one(gaussian(shape, 1)), gaussian(shape, 2)
    expected = total + compressor.decompress_one(payload) * weight
    accumulate(compressor, total, payload, weight)
    assert torch.equal(total, expected)


def test_adding_to_a_tensor_with_gaps_changes_it_and_nothing_between(
    compressor: Compressor, gaussian: Callable[..., Tensor], device: str
):
    payload, whole = compressor.compress_one(gaussian((8, 3, 66))), torch.zeros(66, 6, 8, device=device)
    total = whole[:, ::2].permute(2, 1, 0)
    accumulate(compressor, total, payload, 1.0)
    assert torch.equal(total, compressor.decompress_one(payload))
    assert not whole[:, 1::2].any()


def test_the_order_of_arrival_changes_no_bit_of_the_aggregate(compressor: Compressor):
    codec, shapes = Codec(compressor), (SHAPE, (999,))
    numel = SHAPE[0] * SHAPE[1] + 999
    tensors = [torch.randn(numel, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    bodies = [codec.encode(tensor, {}, shapes).body for tensor in tensors]
    adders = [
        (bytes([peer]), partial(codec.add, payloads=codec.unpack(data, shapes)), 1.0 + peer)
        for peer, data in enumerate(bodies)
    ]
    means = [mean_of(torch.zeros(numel), order) for order in itertools.permutations(adders)]
    assert all(torch.equal(mean, means[0]) for mean in means)
    decoded = [(bytes([peer]), codec.decode(data, shapes), 1.0 + peer) for peer, data in enumerate(bodies)]
    assert torch.equal(mean_pseudo_gradient(decoded), means[0])
