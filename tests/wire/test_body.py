"""Bodies: exact sizes, the same tensors on both sides, and hostile bytes that end in PayloadError."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decentral.compressors import Payload, parse_compressor
from decentral.errors import PayloadError
from decentral.wire import body

SPELLINGS = [
    "none",
    "fp16",
    "bf16",
    "int8(block=64)",
    "e3m0(block=32)",
    "topk(k=4, chunk=64) >> signmag2",
    "topk(k=4, chunk=64)",
]
SHAPES = [(), (1,), (3, 5), (64, 64), (70, 3), (0,), (2, 0, 4)]

every_compressor = pytest.mark.parametrize("spelling", SPELLINGS)


def random_tensors(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


@every_compressor
def test_a_body_has_the_size_that_the_shapes_say_and_decodes_to_what_the_sender_holds(spelling: str) -> None:
    compressor = parse_compressor(spelling)
    payloads = [compressor.compress(tensor) for tensor in random_tensors()]
    data = body.encode(compressor, payloads)
    assert len(data) == body.nbytes(compressor, SHAPES)
    for found, payload in zip(body.decode(compressor, memoryview(data), SHAPES), payloads, strict=True):
        assert torch.equal(found, compressor.decompress(payload))
        assert found.dtype == torch.float32


def test_floats_are_written_little_endian() -> None:
    compressor = parse_compressor("none")
    assert body.encode(compressor, [compressor.compress(torch.tensor([1.0, -2.0]))]).hex() == "0000803f000000c0"


def test_a_big_endian_machine_turns_every_element_around(monkeypatch: pytest.MonkeyPatch) -> None:
    compressor = parse_compressor("none")
    payload = compressor.compress(torch.arange(3.0))
    plain = body.encode(compressor, [payload])
    monkeypatch.setattr("sys.byteorder", "big")
    turned = body.encode(compressor, [payload])
    assert [turned[i : i + 4] for i in (0, 4, 8)] == [plain[i : i + 4][::-1] for i in (0, 4, 8)]
    assert torch.equal(body.decode(compressor, turned, [(3,)])[0], torch.arange(3.0))


@every_compressor
@pytest.mark.parametrize("change", [-1, 1])
def test_a_body_one_byte_off_is_refused(spelling: str, change: int) -> None:
    compressor = parse_compressor(spelling)
    size = body.nbytes(compressor, [(64, 64)])
    with pytest.raises(PayloadError, match=f"body of {size + change} bytes"):
        body.decode(compressor, bytes(size + change), [(64, 64)])


@every_compressor
@given(seed=st.integers(0, 2**32), share=st.sampled_from([0.01, 0.3, 1.0]))
@settings(max_examples=60, deadline=None)
def test_hostile_bodies_decode_to_finite_tensors_or_payload_error(spelling: str, seed: int, share: float) -> None:
    compressor = parse_compressor(spelling)
    generator = torch.Generator().manual_seed(seed)
    data = bytearray(body.encode(compressor, [compressor.compress(torch.randn(70, 5, generator=generator))]))
    for position in torch.randint(len(data), (max(1, int(share * len(data))),), generator=generator).tolist():
        data[position] = int(torch.randint(256, (1,), generator=generator))
    try:
        (found,) = body.decode(compressor, bytes(data), [(70, 5)])
    except PayloadError:
        return
    assert found.shape == (70, 5)
    assert bool(torch.isfinite(found).all())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    data = torch.tensor([0.0, value]).numpy().tobytes()
    with pytest.raises(PayloadError):
        body.decode(parse_compressor("none"), data, [(2,)])


def test_a_careless_compressor_is_guarded_against_too() -> None:
    class Careless:
        def layout(self, shape):
            return parse_compressor("none").layout(shape)

        def decompress(self, payload):
            return payload.parts[0].reshape(payload.shape)

    data = torch.tensor([float("nan")]).numpy().tobytes()
    with pytest.raises(PayloadError, match="NaN or Inf"):
        body.decode(Careless(), data, [(1,)])


def test_parts_that_are_not_the_layout_are_not_sent() -> None:
    compressor = parse_compressor("none")
    with pytest.raises(PayloadError, match="nothing was sent"):
        body.encode(compressor, [Payload((2,), (torch.zeros(3),))])
    with pytest.raises(PayloadError, match="nothing was sent"):
        body.encode(compressor, [Payload((2,), (torch.zeros(2, dtype=torch.float64),))])


def test_decoded_tensors_do_not_share_memory_with_the_body() -> None:
    data = bytearray(torch.ones(4).numpy().tobytes())
    (found,) = body.decode(parse_compressor("none"), data, [(4,)])
    data[:] = bytes(16)
    assert torch.equal(found, torch.ones(4))
