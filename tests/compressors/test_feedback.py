import pytest
import torch

from decentral.compressors import SignMag2, TopK, Uncompressed
from decentral.errors import ConfigError, NonFiniteError
from tests.kit.owing import compress_with_debt


def test_the_debt_is_decayed_by_beta_and_added_before_compressing():
    tensor, debt = torch.tensor([1.0, 2.0]), torch.tensor([4.0, 8.0])
    payload, after = compress_with_debt(Uncompressed(), tensor, debt, 0.5)
    assert payload.parts[0].tolist() == [3.0, 6.0]
    assert not after.any()


def test_what_was_dropped_is_owed():
    _, debt = compress_with_debt(TopK(k=1, chunk=4), torch.tensor([1.0, -3.0, 2.0, 0.5]), None, 1.0)
    assert debt.tolist() == [1.0, 0.0, 2.0, 0.5]


def test_a_quantisers_error_is_owed_too():
    tensor = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    chain = TopK() >> SignMag2()
    payload, debt = compress_with_debt(chain, tensor, None, 0.95)
    assert torch.equal(debt, tensor - chain.decompress_one(payload))


def test_entries_sent_never_are_sent_in_time():
    """A small constant beside a large one: without feedback it would never arrive."""
    tensor, sent, debt = torch.tensor([1.0, 0.2]), torch.zeros(2), None
    for _ in range(50):
        payload, debt = compress_with_debt(TopK(k=2, chunk=4), tensor, debt, 1.0)
        sent += TopK(k=2, chunk=4).decompress_one(payload)
    assert sent[1] > 8


@pytest.mark.parametrize("beta", [-0.1, 1.1, float("nan")])
def test_a_beta_outside_0_to_1_is_refused(beta):
    with pytest.raises(ConfigError, match=r"must be in \[0, 1\]"):
        compress_with_debt(Uncompressed(), torch.ones(2), None, beta)


def test_a_debt_of_another_shape_is_refused():
    with pytest.raises(ConfigError, match="differ in shape"):
        compress_with_debt(Uncompressed(), torch.ones(2), torch.ones(1), 0.5)


def test_a_debt_that_overflows_is_refused():
    with pytest.raises(NonFiniteError):
        compress_with_debt(Uncompressed(), torch.full((2,), 3e38), torch.full((2,), 3e38), 1.0)
