import pytest
import torch

from decentral.compressors import E3M0, Chain, Float16, Int8, SignMag2, TopK, Uncompressed
from decentral.errors import ConfigError


def test_the_shift_operator_spells_a_chain():
    assert str(TopK() >> SignMag2()) == "topk(k=64, chunk=4096) >> signmag2"
    assert TopK() >> SignMag2() == Chain(TopK(), SignMag2())


def test_an_exact_quantiser_changes_nothing():
    tensor = torch.randn(67, 131, generator=torch.Generator().manual_seed(0))
    alone, chained = TopK().compress(tensor), (TopK() >> Uncompressed()).compress(tensor)
    assert all(torch.equal(a, b) for a, b in zip(alone.parts, chained.parts, strict=True))


@pytest.mark.parametrize("quantiser", [SignMag2(), Int8(), E3M0(), Float16()], ids=str)
def test_only_the_kept_places_are_set(quantiser):
    tensor = torch.randn(67, 131, generator=torch.Generator().manual_seed(0))
    kept = TopK().decompress(TopK().compress(tensor))
    chain = TopK() >> quantiser
    assert not chain.decompress(chain.compress(tensor))[kept == 0].any()


def test_the_left_side_must_select():
    with pytest.raises(ConfigError, match="left side of >> must be a sparsifier"):
        Int8() >> SignMag2()


def test_the_right_side_must_quantise():
    for right in (TopK(), TopK() >> SignMag2(), 3):
        with pytest.raises(ConfigError, match="right side of >> must quantise"):
            TopK() >> right
