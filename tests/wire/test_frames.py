"""Frames: one encoding, and no changed byte passes."""

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
@settings(max_examples=300, deadline=None)
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


@given(st.binary(max_size=400))
@settings(max_examples=500, deadline=None)
def test_random_bytes_give_payload_errors_only(data: bytes) -> None:
    with pytest.raises(PayloadError):
        parse(data, lambda _: max(0, len(data) - HEADER_NBYTES))


@given(st.binary(min_size=HEADER_NBYTES, max_size=HEADER_NBYTES + 20))
@settings(max_examples=500, deadline=None)
def test_random_bytes_behind_a_right_beginning_give_payload_errors_only(data: bytes) -> None:
    with pytest.raises(PayloadError):
        parse(b"DCFR\1\0\1\0" + data[8:], lambda _: len(data) - HEADER_NBYTES)


@pytest.mark.parametrize(
    ("offset", "value", "complaint"),
    [
        (0, b"PK\3\4", "magic"),
        (4, b"\2\0", "version 2, this library reads 3"),
        (6, b"\0\0", "unknown kind 0"),
        (6, b"\6\0", "unknown kind 6"),
        (60, b"\1\0\0\0", "part 1 of 1"),
        (64, b"\0\0\0\0", "part 0 of 0"),
        (140, b"\x08\0\0\0", "8 channels beside the change, at most 7"),
        (48, b"\xff" * 8, "not signed by the sender"),
        (104, SIGNER.peer[::-1], "not signed by the sender"),
        (152, b"\xff" * 32, "not signed by the sender"),
        (184, bytes(32), "does not have the hash"),
    ],
)
def test_what_is_wrong_with_a_frame_is_named(offset: int, value: bytes, complaint: str) -> None:
    frame = seal(header(), b"some body", SIGNER)
    data = bytearray(frame.data)
    data[offset : offset + len(value)] = value
    with pytest.raises(PayloadError, match=complaint) as caught:
        parse(bytes(data), exactly(frame))
    assert "\n" not in str(caught.value)


def test_a_frame_signed_by_another_peer_is_refused() -> None:
    frame, stranger = seal(header(), b"body", SIGNER), Signer(bytes([1] * 32))
    signed = frame.data[: HEADER_NBYTES - 64]
    stolen = signed + stranger.sign(signed) + frame.body
    with pytest.raises(PayloadError, match="not signed by the sender"):
        parse(stolen, exactly(frame))


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
