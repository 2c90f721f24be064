"""Many tensors at once decode to what one at a time does."""

import math

import pytest
import torch

from decentral.compressors import (
    E3M0,
    Chain,
    Float16,
    Int8,
    Payload,
    SignMag2,
    TopK,
    Uncompressed,
    accumulate,
    base,
    parse_compressor,
)
from decentral.compressors.base import add_flat, compress_flat
from decentral.compressors.feedback import ErrorFeedback
from decentral.errors import ConfigError, NonFiniteError, PayloadError
from decentral.parameters import split
from tests.laws.conftest import DEVICES

SHAPES = ((64, 64), (130, 70), (70,), (192, 128), (4097,), (3, 5, 7), (1, 1), (64, 200), (0, 4), ())
CHAINS = ["topk(k=64, chunk=4096) >> signmag2", "topk(k=4, chunk=256) >> int8", "topk(k=8, chunk=1024)", "topk >> sign"]


def gaussian(device: str) -> torch.Tensor:
    numel = sum(torch.Size(shape).numel() for shape in SHAPES)
    return torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spelling", [*CHAINS, "randk >> signmag2", "int8", "signmag2"])
def test_payloads_are_those_of_one_tensor_at_a_time(spelling: str, device: str):
    chain, flat_N = parse_compressor(spelling), gaussian(device)
    payloads = chain.compress(split(flat_N, SHAPES))
    for payload, decoded, tensor in zip(payloads, chain.decompress(payloads), split(flat_N, SHAPES), strict=True):
        alone = chain.compress_one(tensor)
        assert payload.shape == alone.shape
        assert [(p.dtype, p.shape) for p in payload.parts] == [(p.dtype, p.shape) for p in alone.parts]
        torch.testing.assert_close(decoded.tensor(), chain.decompress_one(alone), rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spelling", CHAINS)
def test_adding_many_adds_what_a_receiver_decodes(spelling: str, device: str):
    chain, flat_N = parse_compressor(spelling), gaussian(device)
    payloads = compress_flat(chain, flat_N, SHAPES)
    one_N, other_N = flat_N.clone(), flat_N.clone()
    add_flat(chain, one_N, payloads, -1.0)
    for piece, payload in zip(split(other_N, SHAPES), payloads, strict=True):
        piece -= chain.decompress_one(payload)
    assert torch.equal(one_N, other_N)


@pytest.mark.parametrize("device", DEVICES)
def test_a_device_keeps_and_places_what_the_processor_does(device: str):
    topk, tensors = TopK(k=4, chunk=256), [tensor for tensor in split(gaussian(device), SHAPES) if tensor.numel()]
    shapes, selected = [tuple(tensor.shape) for tensor in tensors], topk.select_at_once(tensors)
    placed = topk.place_at_once(shapes, selected)
    one_N, sizes = torch.cat([tensor.flatten() for tensor in tensors]), [tensor.numel() for tensor in tensors]
    other_N = one_N.clone()
    base._add_at_once(one_N, sizes, placed, -0.3)
    for tensor, kept, decoded, total_n in zip(tensors, selected, placed, other_N.split(sizes), strict=True):
        here = topk.select_one(tensor.cpu())
        assert all(
            torch.equal(a.cpu(), b) for one, two in zip(kept, here, strict=True) for a, b in zip(one, two, strict=True)
        )
        arrived = topk.place_one(tuple(tensor.shape), *here)
        assert torch.equal(decoded.tensor().cpu(), arrived.tensor())
        total_n += arrived.tensor().to(device).flatten() * -0.3
    assert torch.equal(one_N, other_N)


@pytest.mark.parametrize("device", DEVICES)
def test_a_device_refuses_a_bad_index(device: str):
    topk, tensors = TopK(k=4, chunk=256), split(gaussian(device), SHAPES)[:2]
    (first, second) = topk.select_at_once(tensors)
    first[0][0][0, 1] = first[0][0][0, 0]
    with pytest.raises(PayloadError, match="rise"):
        topk.place_at_once(SHAPES[:2], [first, second])


@pytest.mark.parametrize("beta", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("device", DEVICES)
def test_the_debt_made_on_a_device_is_what_receivers_lack(device: str, beta: float):
    chain, flat_N = parse_compressor(CHAINS[0]), gaussian(device)
    sending = ErrorFeedback(beta)._send_from_device(chain, flat_N, {"debt": flat_N * 0.5}, SHAPES)
    arrived_N = torch.zeros(flat_N.numel())
    here = [type(one)(one.shape, tuple(part.cpu() for part in one.parts)) for one in sending.payloads]
    add_flat(chain, arrived_N, here)
    torch.testing.assert_close(arrived_N + sending.state["debt"].cpu(), (flat_N * (1 + 0.5 * beta)).cpu())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nan_and_inf_are_refused(poison: float, device: str):
    flat_N = gaussian(device)
    flat_N[5000] = poison
    with pytest.raises(NonFiniteError):
        compress_flat(parse_compressor(CHAINS[0]), flat_N, SHAPES)
    with pytest.raises(NonFiniteError):
        TopK().select_at_once(split(flat_N, SHAPES))


# ---- test bands ----
#
# A payload added band by band is the payload added at once, bit for bit.

SHAPES_of_bands = [
    (64, 64),
    (700, 4096),
    (600, 1365),
    (64 * 9 + 5, 2048),
    (3, 5),
    (1 << 21,),
    (20, 3, 40_000),
    (0, 7),
    (130, 1),
]
SPELLINGS = [
    "topk(k=64, chunk=4096) >> signmag2",
    "topk(k=8, chunk=256) >> int8",
    "topk",
    "randk >> fp16",
    "int8",
    "none",
]


def made(spelling: str, shape: tuple[int, ...]) -> Payload:
    return parse_compressor(spelling).compress_one(torch.randn(shape, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("shape", SHAPES_of_bands, ids=str)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_bands_add_up_to_the_bits_of_the_whole(spelling: str, shape: tuple[int, ...]):
    compressor, payload, numel = parse_compressor(spelling), made(spelling, shape), math.prod(shape)
    whole_N = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    total_N, band = whole_N.clone(), compressor.band(shape)
    accumulate(compressor, whole_N.view(shape), payload, 0.3)
    (decoded,) = compressor.decompress([payload])
    for start in range(0, numel, max(1, band)):
        decoded.add(start, total_N[start : start + band], 0.3)
    assert torch.equal(total_N, whole_N)


@pytest.mark.parametrize("shape", [(700, 4096), (40_000, 64)], ids=str)
def test_a_large_matrix_has_several_bands_of_whole_tiles(shape: tuple[int, ...]):
    band = parse_compressor("topk >> signmag2").band(shape)
    assert band < math.prod(shape)
    assert band % (64 * shape[1]) == 0


def test_an_index_out_of_its_place_is_refused_before_anything_is_added():
    compressor, payload = parse_compressor("topk >> signmag2"), made("topk >> signmag2", (700, 4096))
    index = payload.parts[0].clone()
    index[-1, -1] = index[-1, -2]
    with pytest.raises(PayloadError, match="rise"):
        compressor.decompress([Payload(payload.shape, (index, *payload.parts[1:]))])


def test_the_shift_operator_spells_a_chain():
    assert str(TopK() >> SignMag2()) == "topk(k=64, chunk=4096) >> signmag2"
    assert TopK() >> SignMag2() == Chain(TopK(), SignMag2())


def test_an_exact_quantiser_changes_nothing():
    tensor = torch.randn(67, 131, generator=torch.Generator().manual_seed(0))
    alone, chained = TopK().compress_one(tensor), (TopK() >> Uncompressed()).compress_one(tensor)
    assert all(torch.equal(a, b) for a, b in zip(alone.parts, chained.parts, strict=True))


@pytest.mark.parametrize("quantiser", [SignMag2(), Int8(), E3M0(), Float16()], ids=str)
def test_only_the_kept_places_are_set(quantiser):
    tensor = torch.randn(67, 131, generator=torch.Generator().manual_seed(0))
    kept = TopK().decompress_one(TopK().compress_one(tensor))
    chain = TopK() >> quantiser
    assert not chain.decompress_one(chain.compress_one(tensor))[kept == 0].any()


def test_the_left_side_must_select():
    with pytest.raises(ConfigError, match="left side of >> must be a sparsifier"):
        Int8() >> SignMag2()


def test_the_right_side_must_quantise():
    for right in (TopK(), TopK() >> SignMag2(), 3):
        with pytest.raises(ConfigError, match="right side of >> must quantise"):
            TopK() >> right
