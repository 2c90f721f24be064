"""Chunks by planes: zstd frames that lie about their size, that are bombs, and that are more or less than one frame.

Written by hand: what zstd itself writes may change with its version.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from hashlib import blake2b

from tests.fuzz.targets import PACKED_NBYTES
from tests.kit.builders import ACCEPTED, STRANGE, Entry

MAGIC = bytes.fromhex("28b52ffd")
RAW, RUN, COMPRESSED, RESERVED = range(4)
LARGEST_BLOCK = 1 << 17


def block(kind: int, nbytes: int, content: bytes, *, last: bool = False) -> bytes:
    return (nbytes << 3 | kind << 1 | last).to_bytes(3, "little") + content


def runs(count: int, nbytes: int) -> bytes:
    """So many blocks, each of which is one byte that stands for ``nbytes``."""
    return b"".join(block(RUN, nbytes, b"A", last=number == count - 1) for number in range(count))


def single(nbytes: int, blocks: bytes, flags: int = 0, dictionary: bytes = b"") -> bytes:
    """A frame that declares its content's size, and no window beside it."""
    return MAGIC + bytes([0xE0 | flags]) + dictionary + struct.pack("<Q", nbytes) + blocks


def windowed(log: int, nbytes: int | None, blocks: bytes) -> bytes:
    """A frame with a window of ``2**log``, and a size or none."""
    size = b"" if nbytes is None else struct.pack("<Q", nbytes)
    return MAGIC + bytes([0x00 if nbytes is None else 0xC0, (log - 10) << 3]) + size + blocks


def file_of(content: bytes, *forms: bytes, nbytes: int | None = None, lengths: tuple[int, ...] = ()) -> bytes:
    """A packed file: its chunks in these forms, and what it says of them."""
    told = lengths or tuple(len(form) for form in forms)
    chunks = b"".join(struct.pack("<I", length) + form for length, form in zip(told, forms, strict=True))
    size = len(content) if nbytes is None else nbytes
    return b"DCPK" + struct.pack("<Q", size) + chunks + blake2b(content, digest_size=32).digest()


def files() -> Iterator[Entry]:
    target, content = "packed file", b"A" * 8
    plain, by_planes = b"\0" + content, b"\1" + single(8, runs(1, 8))
    good = file_of(content, plain)
    yield target, "as it is", good, ACCEPTED
    yield target, "of nothing", file_of(b""), ACCEPTED
    yield target, "longer by planes", file_of(content, by_planes), "a chunk of 8 bytes has 18"
    yield target, "empty", b"", "it is cut short"
    yield target, "less one", good[:-1], "it is cut short"
    yield target, "and one", good + b"\0", "something follows it"
    yield target, "another hash", good[:-1] + bytes([good[-1] ^ 1]), "its hash is another"
    yield target, "size 2**64-1", file_of(content, plain, nbytes=2**64 - 1), "a chunk of 262144 bytes came as 8"
    yield target, "size 9", file_of(content, plain, nbytes=9), "a chunk of 9 bytes came as 8"
    yield (
        target,
        "a chunk of 2**32-1",
        file_of(content, plain, lengths=(2**32 - 1,)),
        "a chunk of 8 bytes has 4294967295",
    )
    yield target, "seven bytes by planes", file_of(b"A" * 7, b"\1" + bytes(6)), "a chunk of 7 bytes by planes of four"
    bomb = b"\1" + single(1 << 18, runs(60, LARGEST_BLOCK))
    yield target, "a bomb", file_of(content, bomb, nbytes=1 << 18), "zstd cannot read it"
    for name, data in STRANGE.items():
        yield target, name, data, "is damaged"


def packed() -> Iterator[Entry]:
    yield from files()
    target, whole = "packed chunk", PACKED_NBYTES
    plain = block(RAW, whole, bytes(whole), last=True)
    good = single(whole, runs(1, whole))
    for name, data, words in (
        ("one run", good, ACCEPTED),
        ("four runs", single(whole, runs(4, whole // 4)), ACCEPTED),
        ("a window of its own", windowed(10, whole, runs(1, whole)), ACCEPTED),
        ("as long as it is", single(whole, plain), "came as"),
        ("empty blocks before", single(whole, block(RAW, 0, b"") * 60 + runs(1, whole)), ACCEPTED),
        ("empty blocks without end", single(whole, block(RAW, 0, b"") * 100), "more than 64 blocks"),
        ("size one more", single(whole + 1, runs(1, whole + 1)), f"it declares {whole + 1} bytes"),
        ("size one less", single(whole - 1, runs(1, whole - 1)), f"it declares {whole - 1} bytes"),
        ("size 16 TiB", single(1 << 44, runs(1, whole)), f"it declares {1 << 44} bytes"),
        ("size 2**64-2", single((1 << 64) - 2, runs(1, whole)), "where 400 bytes belong"),
        ("no size", windowed(10, None, runs(1, whole)), "it declares no size"),
        ("bomb that tells", single(1 << 30, runs(60, LARGEST_BLOCK)), f"it declares {1 << 30} bytes"),
        ("bomb that lies", single(whole, runs(60, LARGEST_BLOCK)), "zstd cannot read it"),
        ("bomb behind a window", windowed(10, whole, runs(60, 1 << 10)), "zstd cannot read it"),
        ("shorter than it says", single(whole, runs(1, whole - 4)), "zstd cannot read it"),
        ("window 2**30", windowed(30, whole, runs(1, whole)), "a window of 1073741824 bytes"),
        ("window 2**31", windowed(31, whole, runs(1, whole)), "a window of 2147483648 bytes"),
        ("window 2**11", windowed(11, whole, runs(1, whole)), "a window of 2048 bytes"),
        ("window 2**41", windowed(41, whole, runs(1, whole)), "its head is damaged or cut short"),
        ("a dictionary", single(whole, runs(1, whole), 1, b"\7"), "a dictionary or a checksum"),
        ("a checksum", single(whole, runs(1, whole) + bytes(4), 4), "a dictionary or a checksum"),
        ("a reserved bit", single(whole, runs(1, whole), 8), "its head is damaged or cut short"),
        ("a reserved block", single(whole, block(RESERVED, 1, b"A", last=True)), "zstd cannot read it"),
        ("a block of noise", single(whole, block(COMPRESSED, 9, b"\xff" * 9, last=True)), "zstd cannot read it"),
        ("cut in the magic", good[:3], "it does not begin as one"),
        ("cut in the head", good[:9], "its head is damaged or cut short"),
        ("cut in a block's head", good[:-2], "it is cut short"),
        ("cut in a block", single(whole, block(RAW, 90, bytes(50), last=True)), "it is cut short"),
        ("without a last block", single(whole, block(RUN, whole, b"A")), "it is cut short"),
        ("a byte behind", good + b"\0", "1 bytes follow its end"),
        ("two frames", good + good, f"{len(good)} bytes follow its end"),
        ("an empty frame behind", good + single(0, block(RAW, 0, b"", last=True)), "16 bytes follow its end"),
        ("a skippable frame behind", good + b"\x50\x2a\x4d\x18" + bytes(4), "8 bytes follow its end"),
        ("a skippable frame", b"\x50\x2a\x4d\x18" + struct.pack("<I", whole) + bytes(40), "does not begin as one"),
        ("zstd 0.7", b"\x27" + good[1:], "it does not begin as one"),
        ("nothing", b"", "it does not begin as one"),
    ):
        yield target, name, b"\1" + data, words
    yield target, "as it is", b"\0" + bytes(whole), ACCEPTED
    yield target, "as it is and one", b"\0" + bytes(whole + 1), f"a chunk of {whole} bytes came as {whole + 1}"
    yield target, "as it is less one", b"\0" + bytes(whole - 1), f"a chunk of {whole} bytes came as {whole - 1}"
    yield target, "form 2", b"\2" + bytes(whole), "a chunk in form 02"
    yield target, "no form", b"", "a chunk in form none"
    for name, data in STRANGE.items():
        yield target, name, b"\1" + data, "it does not begin as one"
