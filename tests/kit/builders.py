"""What the corpus is built from: valid frames, streams and lists, and the ways to write broken ones."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import torch

from decentral.coding import bits, rans
from decentral.compressors import parse_compressor
from decentral.replica.codec import Codec
from decentral.wire.frames import FrameKind, Header, seal
from tests.fuzz.targets import ANCHOR, PEERS, ROUND, RUN, SHAPES, SIGNERS

ACCEPTED = "accepted"


Entry = tuple[str, str, bytes, str]  # target, name, content, words


CHAIN = "topk(k=3, chunk=64) >> signmag2"


LOWEST, SHARES = 1 << 15, 1 << 14


def header(**changes: object) -> Header:
    """A contribution to the open round."""
    plain = Header(FrameKind.CONTRIBUTION, RUN, 1, ROUND, 0, 0, 1, 0, ANCHOR, PEERS[0], 30, 15360)
    return replace(plain, **changes)  # type: ignore[arg-type]


def ramp(numel: int) -> torch.Tensor:
    """Values without a pattern that need no generator."""
    return torch.tensor([((n * 2654435761) % 65521 - 32760) / 32760 for n in range(numel)], dtype=torch.float32)


def encoded(spelling: str, shapes: object = SHAPES[0], scale: float = 1.0) -> bytes:
    """A valid body."""
    numel = sum(int(np.prod(shape)) for shape in shapes)  # type: ignore[attr-defined]
    return bytes(Codec(parse_compressor(spelling)).encode(ramp(numel) * scale, {}, shapes).body)  # type: ignore[arg-type]


def frame(content: bytes | None = None, signer: int = 0, **changes: object) -> bytes:
    """A sealed frame."""
    content = encoded(CHAIN) if content is None else content
    return seal(header(sender=PEERS[signer], **changes), content, SIGNERS[signer]).data


def put(data: bytes, at: int, value: bytes) -> bytes:
    """The bytes with some of them replaced."""
    return data[:at] + value + data[at + len(value) :]


STRANGE = {
    "pickle": b"\x80\x04\x95\x1e\0\0\0\0\0\0\0\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.",
    "zip": b"PK\3\4\x14\0\0\0\x08\0" + bytes(40),
    "html": b"<!DOCTYPE html><html><head><title>502 Bad Gateway</title></head><body></body></html>",
    "elf": b"\x7fELF\2\1\1" + bytes(57),
    "utf8 bom": b"\xef\xbb\xbf{}",
    "nul": b"\0",
    "all ones": b"\xff" * 64,
}


def sized(content: bytes) -> bytes:
    """A coded stream's size before it."""
    return struct.pack("<I", len(content)) + content


def bits_of(*numbers: tuple[int, int]) -> bytes:
    """(number, width) each, the first bit lowest."""
    packed, at = np.zeros(4096, dtype=np.uint8), 0
    for number, width in numbers:
        at = int(bits.push(packed, at, number, width))
    return packed[: (at + 7) >> 3].tobytes()


def golomb(number: int, order: int) -> tuple[tuple[int, int], ...]:
    """An Exp-Golomb number as `bits_of` takes it."""
    number += 1 << order
    width = number.bit_length() - 1
    return (0, width - order), (1, 1), (number & ((1 << width) - 1), width)


def shares_table(*rows: tuple[int, int], present: int | None = None) -> bytes:
    """A table of (absent symbols before, share) rows."""
    numbers = [item for absent, share in rows for item in (*golomb(absent, 0), *golomb(share - 1, 6))]
    return bits_of(((len(rows) if present is None else present) - 1, 8), *numbers)


def coded(symbols: bytes, side: bytes = b"", shares: object = None) -> bytes:
    """An entropy coded stream of any symbols, with any side bytes."""
    array = np.frombuffer(symbols, dtype=np.uint8)
    shares = rans.shares_of(rans.counts(array)) if shares is None else shares
    words = b"".join(piece.tobytes() for piece in rans.encode(array, shares))  # type: ignore[arg-type]
    return sized(rans.write_shares(shares).tobytes() + words + side)  # type: ignore[arg-type]


def states(*values: int) -> bytes:
    """The four states of rANS."""
    return struct.pack("<4I", *values)


def counted(*items: bytes, count: int | None = None) -> bytes:
    """A list as messages write it."""
    return struct.pack("<I", len(items) if count is None else count) + b"".join(items)


def sized_text(text: bytes) -> bytes:
    """Text as messages write it."""
    return struct.pack("<H", len(text)) + text
