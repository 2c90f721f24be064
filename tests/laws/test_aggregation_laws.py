"""What every aggregation rule promises of the contributions to one round, whoever sends what."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from decentral.compressors import Compressor, Payload, parse_compressor
from decentral.compressors.base import Method
from decentral.optimizers import Aggregation
from decentral.optimizers.aggregation.base import Sent
from decentral.replica.apply import gram_of
from decentral.replica.codec import Codec
from tests.kit.aggregating import aggregated, gaussian
from tests.kit.tables import BY_LENGTH, BY_PLACE, TRUSTS

COUNT, BAD, NUMEL = 9, 2, 40


def name_of(spelling: str) -> str:
    return spelling.split()[0]


robust = pytest.mark.rules(lambda spelling: name_of(spelling) not in TRUSTS)
alike = pytest.mark.rules(lambda spelling: name_of(spelling) not in BY_PLACE)
wherever = pytest.mark.rules(lambda spelling: name_of(spelling) not in BY_LENGTH and "start=zero" not in spelling)


def close_to(rule: Aggregation, found_N: np.ndarray, wanted_N: np.ndarray, scale: float = 1.0) -> None:
    """In float32 where a rule works on values, and in float64 where it works on inner products."""
    bound = 1e-6 if rule.needs == "rows" else 1e-9
    np.testing.assert_allclose(found_N, wanted_N, rtol=bound, atol=bound * scale)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9])
def test_what_all_send_alike_is_the_result(rule: Aggregation, count: int):
    row_N = gaussian(1, NUMEL)[0]
    found_N = aggregated(rule, np.stack([row_N] * count))
    np.testing.assert_allclose(found_N, row_N, rtol=1e-6)


@alike
def test_the_order_of_the_peers_does_not_matter(rule: Aggregation):
    sent_KN, weights = gaussian(COUNT, NUMEL), np.linspace(0.5, 2.0, COUNT)
    wanted_N = aggregated(rule, sent_KN, weights.tolist())
    for seed in range(4):
        order = np.random.default_rng(seed).permutation(COUNT)
        close_to(rule, aggregated(rule, sent_KN[order], weights[order].tolist()), wanted_N)


@wherever
def test_what_is_added_to_all_is_added_to_the_result(rule: Aggregation):
    sent_KN, added_N = gaussian(COUNT, NUMEL), gaussian(1, NUMEL, 5)[0] * 3
    found_N = aggregated(rule, sent_KN + added_N)
    # a centre that comes to lie on a mixture is as near to it as its floor says, which is a share of a norm
    np.testing.assert_allclose(found_N, aggregated(rule, sent_KN) + added_N, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("times", [1e-6, 1e6])
def test_contributions_of_another_unit_give_the_result_in_that_unit(rule: Aggregation, times: float):
    """Learning rates differ by orders of magnitude: no rule has a length of its own unless a key says one."""
    sent_KN = gaussian(COUNT, NUMEL)
    found_N = aggregated(rule, sent_KN * times) / times
    np.testing.assert_allclose(found_N, aggregated(rule, sent_KN), rtol=1e-5, atol=1e-6)


@robust
@pytest.mark.parametrize("kind", ["alike", "apart", "against"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_liars_at_a_million_times_the_length_move_the_result_less_than_honest_peers_differ(
    rule: Aggregation, kind: str, seed: int
):
    bad = min(getattr(rule, "f", BAD), BAD)  # rules that ask for no f bear nearly half
    honest_KN = gaussian(COUNT - bad, NUMEL, seed)
    honest_N = honest_KN.mean(0)
    lie_KN = {"alike": np.ones((bad, NUMEL)), "apart": gaussian(bad, NUMEL, 50), "against": -np.stack([honest_N] * bad)}
    sent_KN = np.concatenate([1e6 * lie_KN[kind], honest_KN])
    moved = np.linalg.norm(aggregated(rule, sent_KN) - honest_N)
    assert moved < np.linalg.norm(honest_KN - honest_N, axis=1).max()


@robust
def test_a_lie_of_any_finite_length_leaves_the_result_finite(rule: Aggregation):
    sent_KN = gaussian(COUNT, NUMEL)
    for lie in (1e30, 3e38):
        sent_KN[4] = lie
        assert np.isfinite(aggregated(rule, sent_KN)).all()


def test_scales_are_the_same_bits_twice_and_nothing_given_is_changed(rule: Aggregation):
    if rule.needs == "rows":
        row_KN = torch.from_numpy(gaussian(COUNT, NUMEL)).float()
        before_KN = row_KN.clone()
        assert torch.equal(rule.combine(row_KN), rule.combine(row_KN))
        assert torch.equal(row_KN, before_KN)
        return
    sent_KN = gaussian(COUNT, NUMEL)
    gram_KK = sent_KN @ sent_KN.T
    before_KK = gram_KK.copy()
    first, again = (rule.weigh(Sent.of_gram(gram_KK, [1.0] * COUNT, b"seed")) for _ in range(2))
    assert first == again
    assert np.array_equal(gram_KK, before_KK)


def test_a_swarm_of_any_size_gets_a_finite_answer(rule: Aggregation):
    for count in range(1, 14):
        sent_KN = gaussian(count, NUMEL)
        assert np.isfinite(aggregated(rule, sent_KN)).all()
        assert np.isfinite(aggregated(rule, sent_KN, [1.0 / 16, *[16.0] * (count - 1)])).all()


SHAPES = ((70, 64), (130,), (1,), (3, 5, 7))


def test_inner_products_of_what_arrives_are_those_of_the_decompressed(compressor: Compressor):
    """To the bit of a sum lane by lane; a sparse frame is not made dense for it where its parts say places."""
    codec = Codec(compressor)
    numel = sum(int(np.prod(shape)) for shape in SHAPES)
    random = torch.Generator().manual_seed(0)
    sent = [codec.encode(torch.randn(numel, generator=random), {}, SHAPES).payloads for _ in range(3)]
    found_KK = gram_of(codec, sent)
    dense_KK = gram_of(Codec(Opaque(compressor)), sent)
    assert np.array_equal(found_KK, dense_KK)
    rows = torch.stack([codec.decompress(payloads) for payloads in sent]).double()
    np.testing.assert_allclose(found_KK, (rows @ rows.T).numpy(), rtol=1e-10, atol=1e-9)


@dataclass(frozen=True, slots=True)
class Opaque(Method):
    """Shows nothing of a compressor but the tensors."""

    compressor: Compressor

    def decompress_one(self, payload: Payload) -> torch.Tensor:
        return self.compressor.decompress_one(payload)


def test_what_is_sparse_says_its_places():
    for spelling in ("topk(k=64, chunk=4096) >> signmag2", "randk(k=64, chunk=4096)", "threshold(k=64)"):
        compressor = parse_compressor(spelling)
        for shape in ((200, 130), (5000,), (0,), (1, 1)):
            tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1))
            payload = compressor.compress_one(tensor)
            found = compressor.decompress([payload])[0].support()
            assert found is not None
            place_S, value_S = found
            assert len(set(place_S.tolist())) == len(place_S)
            made_N = torch.zeros(tensor.numel()).index_copy_(0, place_S, value_S)
            assert torch.equal(made_N, compressor.decompress_one(payload).flatten())
