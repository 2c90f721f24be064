"""How much a compressor may lose, at the edges of float32 too."""

import pytest
import torch
from torch import Tensor

from decentral.compressors import Compressor
from decentral.errors import ConfigError, NonFiniteError
from tests.kit.tables import follows
from tests.laws.shapes import for_every_shape

SHAPE = (67, 131)


def _sent(compressor: Compressor, tensor: Tensor) -> Tensor:
    return compressor.decompress_one(compressor.compress_one(tensor))


def _error(compressor: Compressor, tensor: Tensor) -> tuple[float, float]:
    """Norms in float64 of what is lost, and of the tensor."""
    lost = tensor.double() - _sent(compressor, tensor).double()
    return float(lost.norm()), float(tensor.double().norm())


@for_every_shape
def test_what_is_lost_is_never_more_than_what_was_there(compressor: Compressor, shape, gaussian):
    lost, whole = _error(compressor, gaussian(shape))
    assert lost <= whole


def test_every_chunk_of_a_gaussian_contracts(compressor: Compressor, gaussian):
    """Strictly: error feedback over such a compressor cannot grow without bound."""
    lost, whole = _error(compressor, gaussian((64, 64)))
    assert lost**2 <= (1 - 1 / 4096) * whole**2


def test_the_edges_of_float32_stay_finite_and_do_not_grow(compressor: Compressor, extreme, device):
    for shape in [(1,), (4097,), SHAPE]:
        tensor = extreme(torch.Size(shape).numel()).reshape(shape).to(device)
        lost, whole = _error(compressor, tensor)
        assert bool(torch.isfinite(_sent(compressor, tensor)).all())
        assert lost <= whole


@for_every_shape
def test_zeros_arrive_as_zeros(compressor: Compressor, shape, device):
    assert not _sent(compressor, torch.zeros(shape, device=device)).any()


@pytest.mark.methods(lambda spelling: not (_redraws(spelling) or _rounds(spelling) or follows(spelling)))
@for_every_shape
def test_sending_what_arrived_changes_nothing_more(compressor: Compressor, shape, gaussian):
    once = _sent(compressor, gaussian(shape))
    assert torch.equal(_sent(compressor, once), once)


@pytest.mark.methods(lambda spelling: _rounds(spelling))
@for_every_shape
def test_sending_what_arrived_changes_little_more_where_what_is_decoded_is_rounded(
    compressor: Compressor, shape, gaussian
):
    once = _sent(compressor, gaussian(shape))
    most = float(once.norm()) / (50 if "int8" in str(compressor) else 1000)
    assert float((_sent(compressor, once) - once).norm()) <= most


@pytest.mark.methods(lambda spelling: follows(spelling) and not (_redraws(spelling) or _rounds(spelling)))
@for_every_shape
def test_where_levels_follow_what_is_sent_the_second_error_is_no_larger_than_the_first(
    compressor: Compressor, shape, gaussian
):
    """Give or take."""
    tensor = gaussian(shape)
    once = _sent(compressor, tensor)
    assert float((_sent(compressor, once) - once).norm()) <= 1.1 * float((once - tensor).norm())


def _redraws(spelling: str) -> bool:
    """Whether places are drawn by what is sent: other ones for what arrived."""
    return "randk" in spelling


def _rounds(spelling: str) -> bool:
    """Whether decoding multiplies by a matrix, and rounds."""
    return "dct" in spelling or "lowrank" in spelling


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 4095, -1])
def test_nan_and_inf_are_refused_by_name(compressor: Compressor, bad: float, place: int, gaussian):
    tensor = gaussian((4099,))
    tensor[place] = bad
    with pytest.raises(NonFiniteError, match=r"NaN or Inf in a tensor of shape \(4099,\)"):
        compressor.compress_one(tensor)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_other_types_are_refused(compressor: Compressor, dtype: torch.dtype):
    with pytest.raises(ConfigError, match="float32, bfloat16 or float16 is wanted"):
        compressor.compress_one(torch.ones(8, dtype=dtype))
