"""Bodies: parts that a compressor never makes, and streams that do not fit its layout."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from decentral.compressors import Payload, parse_compressor
from decentral.replica.codec import Codec
from decentral.wire import body
from tests.fuzz.targets import SHAPES
from tests.kit.builders import ACCEPTED, CHAIN, STRANGE, Entry, coded, encoded, ramp


def parts_body(spelling: str, *parts: torch.Tensor, shape: tuple[int, ...] = SHAPES[0][0]) -> bytes:
    """The body of parts that no compressor made."""
    return body.encode(parse_compressor(spelling), [Payload(shape, parts)])


FLOATS = {
    "quiet nan": 0x7FC00000,
    "signalling nan": 0x7F800001,
    "nan with a payload": 0xFFFFFFFF,
    "inf": 0x7F800000,
    "minus inf": 0xFF800000,
}


LEGAL_FLOATS = {"minus zero": 0x80000000, "denormal": 1, "largest": 0x7F7F0000, "lowest": 0xFF7F0000}


def word(pattern: int, dtype: torch.dtype) -> torch.Tensor:
    """The float with this pattern, cut to 16 bits where there are no more."""
    if dtype == torch.float16:  # the same kinds of value, in its own spelling
        exponent = {0xFF: 0x1F, 0: 0, 0xFE: 0x1E}[pattern >> 23 & 0xFF]
        pattern = (pattern >> 16 & 0x8000) | exponent << 10 | (1 if pattern & 0x7FFFFF else 0)
        return torch.tensor([pattern], dtype=torch.int32).to(torch.int16).view(dtype)
    if dtype == torch.bfloat16:
        pattern = pattern >> 16 | (1 if pattern & 0xFFFF else 0)
        return torch.tensor([pattern], dtype=torch.int32).to(torch.int16).view(dtype)
    return torch.tensor([pattern], dtype=torch.int64).to(torch.int32).view(dtype)


def bodies() -> Iterator[Entry]:
    for spelling in ("none", "bf16", "fp16", "int8(block=8)", "e3m0(block=8)", "signmag2", CHAIN):
        target, good = f"body {spelling}", encoded(spelling)
        yield target, "as it should be", good, ACCEPTED
        yield target, "empty", b"", "it ends before its size"
        yield target, "trailing byte", good[:-1], "refused"
        yield target, "two", good + good, ("longer than" if 2 * len(good) > _most(spelling) else "reads")
        yield target, "size 2**32-1", b"\xff" * 4 + good[4:], "4294967295 bytes, raw it has"
        for name, data in STRANGE.items():
            yield target, name, data, "longer than" if len(data) > _most(spelling) else "refused"
    for spelling, dtype in {"none": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}.items():
        for place in (0, 143):
            for name, pattern in (FLOATS | LEGAL_FLOATS).items():
                values = ramp(144).to(dtype)
                values[place] = word(pattern, dtype)[0]
                words = ACCEPTED if name in LEGAL_FLOATS else "every value must be finite"
                yield f"body {spelling}", f"{name} at {place}", parts_body(spelling, values), words
    yield from _scales()
    yield from _levels()
    yield from _kept()


def _most(spelling: str) -> int:
    return Codec(parse_compressor(spelling)).max_body_nbytes(SHAPES[0])


def _scales() -> Iterator[Entry]:
    codes = torch.arange(144).remainder(255).add(1).to(torch.uint8)
    for name, pattern in (FLOATS | {"minus one": 0xBF800000, "1e38": 0x7E967699, "largest": 0x7F7FFFFF}).items():
        scales = torch.ones(18)
        scales[17] = word(pattern, torch.float32)[0]
        yield "body int8(block=8)", f"scale {name}", parts_body("int8(block=8)", codes, scales), "a scale is bad"
    for name, value in {"zero": 0.0, "denormal": 2.0**-149, "the largest": 129 * 2.0**114}.items():
        scales = torch.full((18,), value)
        yield "body int8(block=8)", f"scale {name}", parts_body("int8(block=8)", codes, scales), ACCEPTED
    zero = codes.clone()
    zero[9] = 0
    yield "body int8(block=8)", "code 0", parts_body("int8(block=8)", zero, torch.ones(18)), "code 0 is not used"
    codes = torch.arange(144).remainder(8).to(torch.uint8)
    for name, pattern in (FLOATS | {"minus one": 0xBF800000}).items():
        scales = torch.ones(18, dtype=torch.bfloat16)
        scales[17] = word(pattern, torch.bfloat16)[0]
        yield "body e3m0(block=8)", f"scale {name}", parts_body("e3m0(block=8)", codes, scales), "a scale is bad"
    largest = torch.full((18,), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    yield "body e3m0(block=8)", "scale the largest", parts_body("e3m0(block=8)", codes, largest), ACCEPTED
    yield "body e3m0(block=8)", "minus zero", parts_body("e3m0(block=8)", codes + 8, largest), "code 8, minus zero"


def _levels() -> Iterator[Entry]:
    codes = torch.arange(144).remainder(4).to(torch.uint8)
    peak, level, step = (torch.tensor([n], dtype=torch.uint8) for n in (227, 255, 255))
    rows = level.expand(12)
    yield "body signmag2", "highest peak", parts_body("signmag2", codes, peak, rows, step.expand(12)), ACCEPTED
    beyond = parts_body("signmag2", codes, peak + 1, rows, step.expand(12))
    yield "body signmag2", "peak too high", beyond, "a peak is beyond float32"
    below = parts_body("signmag2", codes, peak, rows - 1, step.expand(12))
    yield "body signmag2", "step below zero", below, "a small level lies below zero"
    four = coded(bytes([4] * 144))  # codes have two bits
    yield "body signmag2", "code 4", four + bytes(4) + b"\xe3" + coded(bytes([9] * 12)), "a code does not fit 2 bits"


def _kept() -> Iterator[Entry]:
    target, good = f"body {CHAIN}", encoded(CHAIN)
    layout = parse_compressor(CHAIN).layout(SHAPES[0][0])
    raw = sum(spec.nbytes for spec in layout if spec.name == "index")
    assert good[:4] == bytes(4), "so few indices are sent as they are"
    index, rest = good[: 4 + raw], good[4 + raw :]
    words = "indices must rise strictly within"
    yield target, "indices all ones", bytes(4) + b"\xff" * raw + rest, "bits after the last index must be zero"
    yield target, "indices all zero", bytes(4) + bytes(raw) + rest, words
    yield target, "indices missing", rest, words
    yield target, "indices twice", index + good, "longer than"
    target = "body topk(k=3, chunk=64)"
    for name, pattern in FLOATS.items():
        yield target, f"kept {name}", _kept_value(pattern), "every value must be finite"


def _kept_value(pattern: int) -> bytes:
    compressor = parse_compressor("topk(k=3, chunk=64)")
    parts = [part.clone() for part in compressor.compress_one(ramp(144).view(12, 12)).parts]
    parts[-1].view(-1)[-1] = word(pattern, torch.float32)[0]
    return body.encode(compressor, [Payload((12, 12), tuple(parts))])
