"""Frames: what is wrong with a header, a hash, a signature, a size."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from decentral.wire.frames import HEADER_NBYTES, FrameKind
from tests.fuzz.targets import PEERS, PLAN, ROUND, SHAPES, sealed
from tests.kit.builders import ACCEPTED, CHAIN, STRANGE, Entry, encoded, frame, put


def frames() -> Iterator[Entry]:
    good = frame()
    rest = b"\0" * (HEADER_NBYTES + 8)
    for name, data in STRANGE.items():
        yield "frame", name, data, "a header alone takes 280"
        yield "frame", f"{name} and more", data + rest, "magic"
    yield "frame", "as it should be", good, ACCEPTED
    yield "frame", "empty", b"", "0 bytes, a header alone takes 280"
    yield "frame", "one byte", good[:1], "1 bytes, a header alone"
    yield "frame", "header less one", good[: HEADER_NBYTES - 1], "279 bytes, a header alone"
    yield "frame", "header alone", good[:HEADER_NBYTES], "does not have the hash"
    yield "frame", "body less one", good[:-1], "does not have the hash"
    yield "frame", "body and one", good + b"\0", "the schema allows"
    yield "frame", "two frames", good + good, "the schema allows"
    for name, at, value, words in _HEADER_FAULTS:
        yield "frame", name, sealed(put(good, at, value)), words
    yield from _more_frames(good)
    yield from _signatures(good)
    yield from _pieces(good)
    yield from _wants()


_HEADER_FAULTS = [
    ("magic", 0, b"DCFS", "magic"),
    ("version 1", 4, b"\1\0", "version 1, this library reads 3"),
    ("version 65535", 4, b"\xff\xff", "version 65535"),
    ("kind 0", 6, b"\0\0", "unknown kind 0"),
    ("kind 6", 6, b"\6\0", "unknown kind 6"),
    ("kind 65535", 6, b"\xff\xff", "unknown kind 65535"),
    ("eight channels beside the change", 140, b"\x08\0\0\0", "8 channels beside the change, at most 7"),
    ("too many channels", 140, b"\0\0\0\x80", "2147483648 channels beside the change, at most 7"),
    ("parts 0", 64, bytes(4), "part 0 of 0"),
    ("part is parts", 60, b"\1\0\0\0", "part 1 of 1"),
    ("part 2**32-1", 60, b"\xff" * 4, "part 4294967295 of 1"),
    ("other run", 8, b"\xab", "frame of run ab"),
    ("fragment beyond", 56, b"\2\0\0\0", "frame for fragment 2 of 2"),
    ("fragment 2**32-1", 56, b"\xff" * 4, "frame for fragment 4294967295 of 2"),
    ("fragment another", 56, b"\1\0\0\0", "refused"),
    ("round before", 48, (ROUND - 1).to_bytes(8, "little"), "frame of round 16 while round 17 is open"),
    ("round 0", 48, bytes(8), "frame of round 0"),
    ("round 2**64-1", 48, b"\xff" * 8, "frame of round 18446744073709551615"),
    ("round next", 48, (ROUND + 1).to_bytes(8, "little"), ACCEPTED),
    ("round after next", 48, (ROUND + 2).to_bytes(8, "little"), "frame of round 19"),
    ("steps and tokens at their ends", 136, b"\xff" * 4 + bytes(4) + b"\xff" * 8, ACCEPTED),
    ("no steps and no tokens", 136, bytes(16), ACCEPTED),
    ("claims whose hash nobody knows", 152, b"\xff" * 32, ACCEPTED),
    ("kind slice without its plan", 6, b"\2\0", "frame of plan 0 in round 17, which is not known here"),
    ("kind merge with another's body", 6, b"\5\0", "stream refused"),
]


def _more_frames(good: bytes) -> Iterator[Entry]:
    part = encoded(CHAIN, ((100,),))
    sliced = {"part": 0, "parts": 2, "plan": PLAN}
    yield "frame", "slice", frame(part, 2, kind=FrameKind.SLICE, **sliced), ACCEPTED
    yield "frame", "result", frame(part, 0, kind=FrameKind.RESULT, **sliced), ACCEPTED
    yield "frame", "result by another", frame(part, 1, kind=FrameKind.RESULT, **sliced), "a peer that does not own it"
    yield "frame", "slice of no part", frame(part, kind=FrameKind.SLICE, part=2, parts=3, plan=PLAN), "for part 2 of 2"
    wrong = frame(part, kind=FrameKind.SLICE, fragment=1, **sliced)
    yield "frame", "slice of another fragment", wrong, "plan 65536 does not cover fragment 1"
    yield "frame", "swap", frame(encoded(CHAIN, SHAPES[0] * 2), kind=FrameKind.SWAP, states=1), ACCEPTED
    yield "frame", "merge", frame(encoded("none"), kind=FrameKind.MERGE), ACCEPTED
    yield "frame", "empty body", frame(b""), "it ends before its size"
    yield "frame", "body of one byte", frame(b"\0"), "it ends before its size"
    yield "frame", "body less one sealed", frame(encoded(CHAIN)[:-1]), "refused"
    yield "frame", "body and one sealed", frame(encoded(CHAIN) + b"\0"), "the schema allows 44"
    yield "frame", "body after body", frame(encoded(CHAIN) * 2), "the schema allows"


def _pieces(good: bytes) -> Iterator[Entry]:
    head, size = good[:HEADER_NBYTES], len(good)

    def piece(nbytes: int, start: int, flag: int, data: bytes, head: bytes = head) -> bytes:
        return head + struct.pack("<QQB", nbytes, start, flag) + data

    for name, data in STRANGE.items():
        yield "piece", name, data, "its head alone takes 297"
    yield "piece", "as it should be", piece(size, 0, 1, good[:100]), ACCEPTED
    yield "piece", "all of it", piece(size, 0, 0, good), ACCEPTED
    yield "piece", "empty", b"", "piece of 0 bytes"
    yield "piece", "no data", piece(size, 0, 0, b""), "its head alone takes 297"
    yield "piece", "flag 2", piece(size, 0, 2, b"x"), "flag byte 2"
    yield "piece", "beyond its end", piece(size, size - 1, 0, b"xy"), "it ends at"
    yield "piece", "start 2**64-1", piece(size, 2**64 - 1, 0, b"x"), "it ends at"
    yield "piece", "of 2**64-1 bytes", piece(2**64 - 1, 0, 0, b"x"), "the schema allows"
    yield "piece", "of less than a header", piece(HEADER_NBYTES - 1, 0, 0, b"x"), "the schema allows"
    yield "piece", "magic", piece(size, 0, 0, b"x", put(head, 0, b"DCFS")), "magic"
    yield "piece", "round before", piece(size, 0, 0, b"x", put(head, 48, bytes(8))), "frame of round 0"
    yield "piece", "sender another", piece(size, 0, 0, b"x", put(head, 104, PEERS[1])), "not signed by the sender"
    yield "piece", "signature zero", piece(size, 0, 0, b"x", head[:-64] + bytes(64)), "not signed by the sender"


_ORDER = 2**252 + 27742317777372353535851937790883648493


def _signatures(good: bytes) -> Iterator[Entry]:
    words, stranger = "not signed by the sender it names", "of a peer that is no member"
    at = HEADER_NBYTES - 64
    other = frame(encoded(CHAIN), 1)
    yield "frame", "sender another", put(good, 104, PEERS[1]), words
    yield "frame", "signature of another frame", put(good, at, frame(tokens=1)[at:HEADER_NBYTES]), words
    yield "frame", "signature of another peer", put(good, at, other[at:HEADER_NBYTES]), words
    yield "frame", "signature zero", put(good, at, bytes(64)), words
    larger = int.from_bytes(good[at + 32 : HEADER_NBYTES], "little") + _ORDER
    yield "frame", "signature s plus l", put(good, at + 32, larger.to_bytes(32, "little")), words
    yield "frame", "hash of another frame", put(good, 184, frame(encoded(CHAIN, scale=0.5))[184:216]), "have the hash"
    yield "frame", "hash zero", put(good, 184, bytes(32)), "have the hash"
    y = "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"
    for name, key in {"zero": bytes(32), "one": b"\1" + bytes(31), "of order 8": bytes.fromhex(y)}.items():
        # R = A, S = 0: under a key of small order this signs every eighth text, whoever made it.
        yield "frame", f"key {name}", put(put(good, 104, key), at, key + bytes(32)), stranger
    field = (2**255 - 19 + 3).to_bytes(32, "little")
    yield "frame", "key not canonical", put(good, 104, field), stranger


def _wants() -> Iterator[Entry]:
    name = bytes(range(32))

    def ranges(*ends: int) -> bytes:
        return name + struct.pack(f"<{len(ends)}Q", *ends)

    for title, data in STRANGE.items():
        yield "want", title, data, "do not rise" if len(data) == 64 else "want 32 and 16 for each"
    yield "want", "all of it", name, ACCEPTED
    yield "want", "two ranges", ranges(0, 5, 6, 100), ACCEPTED
    yield "want", "64 ranges", ranges(*range(128)), ACCEPTED
    yield "want", "65 ranges", ranges(*range(130)), "want of 1072 bytes"
    yield "want", "half a hash", name[:16], "want of 16 bytes"
    yield "want", "half a range", ranges(0, 5)[:-8], "want of 40 bytes"
    yield "want", "an empty range", ranges(5, 5), "do not rise"
    yield "want", "a range backwards", ranges(6, 5), "do not rise"
    yield "want", "the same twice", ranges(0, 5, 0, 5), "do not rise"
    yield "want", "one inside another", ranges(0, 9, 3, 5), "do not rise"
    yield "want", "two without a gap", ranges(0, 5, 5, 9), "do not rise"
    yield "want", "beyond its end", ranges(0, 201), "up to 201 of a frame of 200"
    yield "want", "up to 2**64-1", ranges(0, 2**64 - 1), "of a frame of 200"
