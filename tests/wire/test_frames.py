"""Frames: one encoding, and no changed byte passes. What is wrong with one is named: see tests/corpus/frames.py."""

import dataclasses
import hashlib
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decentral.errors import PayloadError
from decentral.wire.frames import HEADER_NBYTES, Frame, FrameKind, Header, parse, seal
from decentral.wire.keys import Signer

SIGNER = Signer(bytes(32))
U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
DIGEST = st.binary(min_size=32, max_size=32)


def header(**changes: object) -> Header:
    plain = Header(FrameKind.CONTRIBUTION, bytes(32), 3, 17, 0, 0, 1, 0, bytes([7] * 32), SIGNER.peer, 30, 15360)
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


@st.composite
def headers(draw: st.DrawFn) -> Header:
    parts = draw(st.integers(1, 2**32 - 1))
    part = draw(st.integers(0, parts - 1))
    kind = draw(st.sampled_from(FrameKind))
    before = (kind, draw(DIGEST), draw(U64), draw(U64), draw(U32), part, parts, draw(U32))
    return Header(*before, draw(DIGEST), SIGNER.peer, draw(U32), draw(U64))


def exactly(frame: Frame):
    return lambda _: len(frame.body)


@given(headers(), st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_parsing_and_writing_again_gives_the_same_bytes(head: Header, body: bytes) -> None:
    frame = seal(head, body, SIGNER)
    data = frame.data
    again = parse(memoryview(data), exactly(frame))
    assert again == frame
    assert again.data == data
    assert again.hash == frame.hash == hashlib.blake2b(data, digest_size=32).digest()
    assert len(data) == frame.nbytes == HEADER_NBYTES + len(body)


def test_no_single_changed_bit_passes() -> None:
    frame = seal(header(), b"some body", SIGNER)
    data = frame.data
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1 << position % 8
        with pytest.raises(PayloadError):
            parse(bytes(changed), exactly(frame))


def test_no_shorter_or_longer_frame_passes() -> None:
    frame = seal(header(), b"some body", SIGNER)
    data = frame.data
    for length in range(len(data)):
        with pytest.raises(PayloadError):
            parse(data[:length], exactly(frame))
    for more in (b"\0", data):
        with pytest.raises(PayloadError, match="the schema allows 9"):
            parse(data + more, exactly(frame))


def test_the_size_is_asked_before_the_body_is_read() -> None:
    frame = seal(header(fragment=9), bytes(8 << 20), SIGNER)
    data = memoryview(frame.data)

    def refuse(found: Header) -> int:
        raise PayloadError(f"no fragment {found.fragment}")

    tracemalloc.start()
    try:
        with pytest.raises(PayloadError, match="no fragment 9"):
            parse(data, refuse)
        with pytest.raises(PayloadError, match="the schema allows 5"):
            parse(data, lambda _: 5)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "changes",
    [
        {"run": b"short"},
        {"base": bytes(33)},
        {"epoch": 2**64},
        {"round": -1},
        {"fragment": 2**32},
        {"tokens": -1},
        {"part": 1},
        {"sender": Signer(bytes([1] * 32)).peer},
    ],
)
def test_a_header_that_cannot_be_written_is_refused_before_it_is_signed(changes: dict[str, object]) -> None:
    with pytest.raises(PayloadError, match="seal"):
        seal(header(**changes), b"", SIGNER)
