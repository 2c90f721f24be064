"""Bodies: bounded sizes, and the same tensors on both sides. Hostile ones are in tests/corpus and tests/fuzz."""

from dataclasses import dataclass

import pytest
import torch

from decentral.compressors import Compressor, Payload, parse_compressor
from decentral.compressors.base import Method
from decentral.errors import PayloadError
from decentral.replica.codec import Codec
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


def tensors_of(compressor: Compressor, data: bytes, shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    return [compressor.decompress_one(payload) for payload in body.decode(compressor, data, shapes)]


@every_compressor
def test_a_body_fits_what_the_shapes_allow_and_decodes_to_what_the_sender_holds(spelling: str) -> None:
    compressor = parse_compressor(spelling)
    payloads = [compressor.compress_one(tensor) for tensor in random_tensors()]
    data = body.encode(compressor, payloads)
    assert len(data) <= body.max_nbytes(compressor, SHAPES)
    for found, payload in zip(tensors_of(compressor, memoryview(data), SHAPES), payloads, strict=True):
        assert torch.equal(found, compressor.decompress_one(payload))
        assert found.dtype == torch.float32
    assert body.encode(compressor, body.decode(compressor, data, SHAPES)) == data


def test_parts_without_a_pattern_are_sent_as_they_are_little_endian() -> None:
    compressor = parse_compressor("none")
    payload = compressor.compress_one(torch.tensor([1.0, -2.0]))
    assert body.encode(compressor, [payload]).hex() == "00000000" + "0000803f000000c0"


def test_the_same_parts_of_all_tensors_are_coded_together() -> None:
    compressor = parse_compressor("int8(block=64)")
    tensors = [torch.randn(500, generator=torch.Generator().manual_seed(seed)) for seed in range(8)]
    together = len(body.encode(compressor, [compressor.compress_one(tensor) for tensor in tensors]))
    apart = sum(len(body.encode(compressor, [compressor.compress_one(tensor)])) for tensor in tensors)
    assert together < 0.98 * apart


@every_compressor
def test_a_body_one_byte_off_is_refused(spelling: str) -> None:
    compressor = parse_compressor(spelling)
    data = bytes(body.encode(compressor, [compressor.compress_one(torch.randn(64, 64))]))
    for wrong in (data[:-1], data + b"\0", data[1:], b""):
        with pytest.raises(PayloadError):
            body.decode(compressor, wrong, [(64, 64)])


def test_a_careless_compressor_is_guarded_against_too() -> None:
    @dataclass(frozen=True)
    class Careless(Method):
        name = "careless"

        def layout(self, shape):
            return parse_compressor("none").layout(shape)

        def decompress_one(self, payload):
            return payload.parts[0].reshape(payload.shape)

    data = bytes(4) + torch.tensor([float("nan")]).numpy().tobytes()
    with pytest.raises(PayloadError, match="NaN or Inf"):
        Codec(Careless()).decode(data, ((1,),))


def test_parts_that_are_not_the_layout_are_not_sent() -> None:
    compressor = parse_compressor("none")
    with pytest.raises(PayloadError, match="nothing was sent"):
        body.encode(compressor, [Payload((2,), (torch.zeros(3),))])
    with pytest.raises(PayloadError, match="nothing was sent"):
        body.encode(compressor, [Payload((2,), (torch.zeros(2, dtype=torch.float64),))])


def test_decoded_tensors_do_not_share_memory_with_the_body() -> None:
    compressor = parse_compressor("none")
    data = bytearray(body.encode(compressor, [compressor.compress_one(torch.ones(4))]))
    (found,) = tensors_of(compressor, data, [(4,)])
    data[:] = bytes(20)
    assert torch.equal(found, torch.ones(4))


@pytest.mark.parametrize("spelling", ["topk(k=64, chunk=1024) >> signmag2", "int8", "none"])
def test_several_threads_write_the_bytes_of_one(spelling: str, monkeypatch: pytest.MonkeyPatch):
    compressor, chance = parse_compressor(spelling), torch.Generator().manual_seed(0)
    payloads = [compressor.compress_one(torch.randn(numel, generator=chance)) for numel in (70_000, 3, 0, 50_001)]
    alone = bytes(body.encode(compressor, payloads))
    monkeypatch.setattr(body, "_ON_THREADS", 1)
    monkeypatch.setattr(body, "_LUMP", 1000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert bytes(body.encode(compressor, payloads)) == alone
