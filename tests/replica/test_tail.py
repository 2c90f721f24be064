"""Buffers behind a frame's body: which frames carry them, what is refused, what becomes of those of several peers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decentral.compressors import parse_compressor
from decentral.errors import NonFiniteError, PayloadError
from decentral.parameters import BufferSpec
from decentral.replica.codec import Codec, range_shapes
from decentral.replica.contents import NO_TAIL, Tail
from decentral.rounds.inbox import Inbox
from decentral.wire.frames import HEADER_NBYTES, Frame, FrameKind, parse, seal
from tests.corpus.builders import header
from tests.fuzz.targets import HEAD, SCHEMA, SHAPES, SIGNERS, THE_PLAN

BUFFERS = (BufferSpec("norm.running_mean", (3,), "float"), BufferSpec("norm.num_batches_tracked", (), "integer"))
WHOLE = replace(SCHEMA, buffers=BUFFERS)
TAIL = Tail.of(WHOLE, "average")
CODEC = Codec(parse_compressor("none"))
VALUES = torch.tensor([0.5, -1.0, 1e30, 7.0])


def inbox(tail: Tail = TAIL) -> Inbox:
    made = Inbox(WHOLE, CODEC, CODEC, tail=tail, channels=2)
    made.expect(THE_PLAN)
    return made


def sealed(tail: bytes, **fields: object) -> Frame:
    made = header(**fields)
    shapes = SHAPES[made.fragment]
    if made.kind in (FrameKind.SLICE, FrameKind.RESULT):
        _, start, stop = THE_PLAN.partition[made.part]
        shapes = range_shapes(start, stop)
    shapes = tuple(shapes) * made.channels
    numel = sum(torch.zeros(shape).numel() for shape in shapes)
    signer = next(one for one in SIGNERS if one.peer == made.sender)
    return seal(made, CODEC.encode(torch.ones(numel), {}, shapes).body, signer, tail)


PLANNED = {"parts": len(THE_PLAN.partition), "plan": THE_PLAN.number}


@pytest.mark.parametrize(
    ("fields", "carries"),
    [
        ({"kind": FrameKind.CONTRIBUTION}, True),
        ({"kind": FrameKind.MERGE}, True),
        ({"kind": FrameKind.SWAP, "states": 1}, True),
        ({"kind": FrameKind.SLICE, "part": 0, **PLANNED}, True),
        ({"kind": FrameKind.RESULT, "part": 0, **PLANNED}, True),
        ({"kind": FrameKind.SLICE, "part": 1, **PLANNED}, False),
        ({"kind": FrameKind.CONTRIBUTION, "fragment": 1}, False),
    ],
    ids=str,
)
def test_what_there_is_of_fragment_0_carries_the_buffers_and_nothing_else_does(fields, carries):
    with_tail, without = sealed(TAIL.pack(VALUES), **fields), sealed(b"", **fields)
    good, bad = (with_tail, without) if carries else (without, with_tail)
    made = inbox()
    frame, decoded = made.check(good.data, HEAD)
    if decoded is None:  # gathered: its parts are kept instead
        decoded = CODEC.decompress(made.unpacked.get(frame))
    told = TAIL.split(frame)[1]
    assert bool((decoded == 1).all())
    assert torch.equal(told, VALUES) if carries else told is None
    with pytest.raises(PayloadError):
        inbox().check(bad.data, HEAD)


def test_a_peer_that_keeps_its_own_sends_and_takes_no_tail():
    own = Tail.of(WHOLE, "own")
    assert own == NO_TAIL
    assert own.pack(VALUES) == b""
    inbox(own).check(sealed(b"").data, HEAD)
    with pytest.raises(PayloadError):
        inbox(own).check(sealed(TAIL.pack(VALUES)).data, HEAD)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_buffers_that_are_not_finite_are_neither_sent_nor_taken(bad):
    values = torch.tensor([0.0, 0.0, bad, 0.0])
    with pytest.raises(NonFiniteError, match=r"NaN or Inf in the buffer norm\.running_mean"):
        TAIL.pack(values)
    with pytest.raises(PayloadError, match="buffers with NaN"):
        inbox().check(sealed(values.numpy().tobytes()).data, HEAD)


@given(st.binary(max_size=700))
def test_any_other_body_is_a_payload_error(body):
    frame = seal(header(), body, SIGNERS[0])
    with pytest.raises(PayloadError):
        inbox().check(frame.data, HEAD)


def test_the_tail_is_counted_by_whoever_bounds_a_frame():
    made = inbox()
    assert made.limit() == inbox(NO_TAIL).limit() + 16
    assert made.max_nbytes(header(), HEAD) == inbox(NO_TAIL).max_nbytes(header(), HEAD) + 16
    assert made.max_nbytes(header(fragment=1), HEAD) == inbox(NO_TAIL).max_nbytes(header(fragment=1), HEAD)


def test_a_body_with_a_tail_is_hashed_and_signed_as_one():
    frame = sealed(TAIL.pack(VALUES))
    assert parse(frame.data, lambda _: len(frame.body)).hash == frame.hash
    forged = bytearray(frame.data)
    forged[-1] ^= 1
    with pytest.raises(PayloadError, match="hash"):
        parse(bytes(forged), lambda _: len(forged) - HEADER_NBYTES)


def test_the_mean_counts_all_alike_is_finite_and_rounds_whole_numbers():
    big = torch.finfo(torch.float32).max
    told = [torch.tensor([1.0, big, 0.0, 7.0]), torch.tensor([2.0, big, 0.0, 8.0]), torch.tensor([6.0, big, 0.0, 8.0])]
    assert TAIL.merged(told).tolist() == [3.0, big, 0.0, 8.0]
    assert torch.equal(TAIL.merged(told[:1]), told[0])


def test_the_first_contributors_buffers_are_taken_as_they_are():
    first = Tail.of(WHOLE, "first")
    assert torch.equal(first.merged([VALUES, torch.zeros(4)]), VALUES)
