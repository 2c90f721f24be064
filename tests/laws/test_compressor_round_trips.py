"""Shapes, sizes and determinism: what every compressor promises about form."""

import pytest
import torch

from decentral.compressors import Compressor, Payload, parse_compressor
from decentral.wire import body
from tests.kit.tables import is_lopsided
from tests.laws.shapes import for_every_shape


def bits(part: torch.Tensor) -> torch.Tensor:
    return part.reshape(-1).view(torch.uint8) if part.numel() else part


@for_every_shape
def test_a_tensor_comes_back_in_its_shape_as_float32_on_its_device(compressor: Compressor, shape, gaussian):
    tensor = gaussian(shape)
    back = compressor.decompress_one(compressor.compress_one(tensor))
    assert (back.shape, back.dtype, back.device) == (tensor.shape, torch.float32, tensor.device)
    assert bool(torch.isfinite(back).all())


@for_every_shape
def test_parts_are_as_declared_and_their_body_takes_no_more_than_declared(compressor: Compressor, shape, gaussian):
    payload = compressor.compress_one(gaussian(shape))
    layout = compressor.layout(shape)
    assert [(part.dtype, tuple(part.shape)) for part in payload.parts] == [(s.dtype, s.shape) for s in layout]
    data = body.encode(compressor, [payload])
    assert len(data) <= body.max_nbytes(compressor, [shape])
    (arrived,) = body.decode(compressor, data, [shape])
    assert all(torch.equal(bits(a), bits(b.cpu())) for a, b in zip(arrived.parts, payload.parts, strict=True))
    assert payload.shape == shape
    assert all(part.is_contiguous() for part in payload.parts)


@for_every_shape
def test_the_same_tensor_gives_the_same_bits_twice(compressor: Compressor, shape, gaussian):
    first, second = (compressor.compress_one(gaussian(shape)) for _ in range(2))
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(first.parts, second.parts, strict=True)
    )
    assert torch.equal(compressor.decompress_one(first), compressor.decompress_one(second))


@for_every_shape
def test_a_half_tensor_is_sent_as_the_float32_that_it_stands_for(compressor: Compressor, shape, gaussian):
    for dtype in (torch.bfloat16, torch.float16):
        tensor = gaussian(shape).to(dtype)
        sent, wanted = compressor.compress_one(tensor), compressor.compress_one(tensor.float())
        assert sent.shape == wanted.shape
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(sent.parts, wanted.parts, strict=True))
        tensor.fill_(7.0)  # a payload in flight must not follow its source
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(sent.parts, wanted.parts, strict=True))


@for_every_shape
def test_neither_the_tensor_nor_the_payload_is_changed(compressor: Compressor, shape, gaussian):
    tensor = gaussian(shape)
    payload = compressor.compress_one(tensor)
    kept = [part.clone() for part in payload.parts]
    back = compressor.decompress_one(payload)
    back.fill_(7.0)
    assert torch.equal(tensor, gaussian(shape))
    assert all(torch.equal(part, before) for part, before in zip(payload.parts, kept, strict=True))
    tensor.fill_(7.0)  # a payload in flight must not follow its source
    assert all(torch.equal(part, before) for part, before in zip(payload.parts, kept, strict=True))


def test_a_transposed_view_compresses_like_its_copy(compressor: Compressor, gaussian):
    view = gaussian((70, 131)).t()
    assert torch.equal(
        compressor.decompress_one(compressor.compress_one(view)),
        compressor.decompress_one(compressor.compress_one(view.contiguous())),
    )


def test_a_parameter_that_requires_gradients_leaves_no_graph(compressor: Compressor, gaussian):
    payload = compressor.compress_one(gaussian((67, 131)).requires_grad_())
    assert not any(part.requires_grad for part in payload.parts)


@pytest.mark.methods(lambda spelling: not is_lopsided(spelling))
@for_every_shape
def test_the_sign_of_the_tensor_is_the_sign_of_what_arrives(compressor: Compressor, shape, gaussian):
    tensor = gaussian(shape)
    there, mirrored = (compressor.decompress_one(compressor.compress_one(side)) for side in (tensor, -tensor))
    assert torch.equal(mirrored, -there)


@pytest.mark.methods(lambda spelling: is_lopsided(spelling))
@for_every_shape
def test_minus_the_tensor_loses_other_things_but_no_more(compressor: Compressor, shape, gaussian):
    tensor = gaussian(shape)
    there, mirrored = (compressor.decompress_one(compressor.compress_one(side)) for side in (tensor, -tensor))
    assert float((mirrored + there).norm()) <= 2 * float((there - tensor).norm())


@for_every_shape
def test_scaling_by_a_power_of_two_scales_what_arrives(compressor: Compressor, shape, gaussian):
    tensor = gaussian(shape)
    once, four_times = (compressor.decompress_one(compressor.compress_one(side)) for side in (tensor, tensor * 4))
    assert torch.allclose(four_times, once * 4, rtol=0, atol=2.0**-22)  # float16 has denormals near 6e-8


def test_decoding_does_not_depend_on_the_default_dtype(compressor: Compressor, gaussian):
    payload = compressor.compress_one(gaussian((67, 131)))
    wanted = compressor.decompress_one(payload)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(compressor.decompress_one(payload), wanted)
        assert compressor.decompress_one(payload).dtype == torch.float32
    finally:
        torch.set_default_dtype(before)


def test_the_spelling_makes_an_equal_compressor(compressor: Compressor):
    assert parse_compressor(str(compressor)) == compressor
    assert hash(parse_compressor(str(compressor))) == hash(compressor)


def test_a_payload_may_travel_to_another_device_and_decode_to_the_same_bits(compressor: Compressor, gaussian):
    payload = compressor.compress_one(gaussian((67, 131)))
    moved = Payload(payload.shape, tuple(part.cpu() for part in payload.parts))
    assert torch.equal(compressor.decompress_one(moved), compressor.decompress_one(payload).cpu())


def test_every_tensor_is_made_on_the_device_of_the_input(compressor: Compressor, monkeypatch):
    """The meta device has no values, but refuses to mix with a CPU tensor just as CUDA does."""
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda tensor: True)  # every rule holds
    for shape in ((0,), (4097,), (67, 131)):  # few: meta is slow
        payload = compressor.compress_one(torch.empty(shape, device="meta"))
        assert {part.device.type for part in payload.parts} <= {"meta"}
        assert compressor.decompress_one(payload).device == payload.device
