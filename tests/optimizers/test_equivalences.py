"""Where an outer step must equal something simpler."""

import torch

from decentral.compressors import TopK, Uncompressed
from decentral.optimizers import mean_pseudo_gradient
from decentral.optimizers.diloco import DiLoCo
from decentral.optimizers.sparseloco import SparseLoCo
from decentral.optimizers.streaming import StreamingDiLoCo
from tests.kit.owing import compress_with_debt
from tests.kit.stepping import step


def gaussian(seed: int) -> torch.Tensor:
    return torch.randn(64, 65, generator=torch.Generator().manual_seed(seed)).double()


def integers(seed: int) -> torch.Tensor:
    return torch.randint(-500, 500, (101,), generator=torch.Generator().manual_seed(seed)).float()


def outer_step(outer, anchor, locals_):
    peers = [(bytes([index]) * 32, anchor - local, 1.0) for index, local in enumerate(locals_)]
    return step(outer, anchor, mean_pseudo_gradient(peers), outer.init(anchor), len(peers))[0]


def test_one_peer_without_momentum_at_rate_1_ends_where_it_trained_to():
    anchor, local = integers(0), integers(1)
    assert torch.equal(outer_step(DiLoCo(lr=1.0, momentum=0.0), anchor, [local]), local)
    assert torch.equal(outer_step(SparseLoCo(lr=1.0), anchor, [local]), local)


def test_one_peer_ends_where_it_trained_to_up_to_rounding_for_any_numbers():
    anchor, local = gaussian(0).float(), gaussian(1).float()
    torch.testing.assert_close(outer_step(DiLoCo(lr=1.0, momentum=0.0), anchor, [local]), local)


def test_without_momentum_at_rate_1_it_averages_the_parameters():
    anchor, locals_ = gaussian(0).float(), [gaussian(seed).float() for seed in range(1, 5)]
    averaged = outer_step(DiLoCo(lr=1.0, momentum=0.0), anchor, locals_)
    torch.testing.assert_close(averaged, torch.stack(locals_).mean(dim=0))


def test_one_inner_sgd_step_is_data_parallel_sgd():
    anchor, gradients, lr = gaussian(0).float(), [gaussian(seed).float() for seed in range(1, 5)], 0.1
    outer = outer_step(DiLoCo(lr=1.0, momentum=0.0), anchor, [anchor - lr * g for g in gradients])
    torch.testing.assert_close(outer, anchor - lr * torch.stack(gradients).mean(dim=0))


def test_streaming_with_one_fragment_no_overlap_and_alpha_0_is_diloco_bit_for_bit():
    anchor, live, diloco, streaming = (
        gaussian(0).float(),
        gaussian(1).float(),
        DiLoCo(0.4, 0.9),
        StreamingDiLoCo(0.4, 0.9),
    )
    one, two = diloco.init(anchor), streaming.init(anchor)
    first = second = anchor
    for _ in range(5):
        first, one = step(diloco, first, first - live, one)
        second, two = step(streaming, second, second - live, two)
        assert torch.equal(StreamingDiLoCo(alpha=0.0).merge(live, live, second), first)


def test_sparseloco_that_keeps_all_owes_nothing_and_is_outer_sgd():
    anchor, local = gaussian(0).float(), gaussian(1).float()
    everything = TopK(k=4096, chunk=4096)
    payload, debt = compress_with_debt(everything, anchor - local, None, 0.95)
    assert not debt.any()
    dense, _ = compress_with_debt(Uncompressed(), anchor - local, None, 0.95)
    assert torch.equal(everything.decompress_one(payload), Uncompressed().decompress_one(dense))
