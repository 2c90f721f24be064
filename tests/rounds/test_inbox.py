"""Whose frames are taken, and what is kept of what they hold: within its bound, and never longer than their rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from decentral.compressors import parse_compressor
from decentral.errors import PayloadError
from decentral.replica.codec import Codec
from decentral.replica.contents import Unpacked, nbytes_of
from decentral.rounds.frame_io import Inbox
from decentral.wire.frames import Frame, FrameKind, seal
from decentral.wire.keys import Signer
from tests.fuzz.targets import HEAD, SCHEMA, SIGNERS, THE_PLAN
from tests.kit.builders import header

CODEC = Codec(parse_compressor("none"))
SHAPES = SCHEMA.fragments[0].shapes
NBYTES = 4 * SCHEMA.fragments[0].numel  # what a frame of no compression holds
HONEST = torch.ones(SCHEMA.fragments[0].numel)
STRANGER = Signer(bytes([77]) * 32)


def test_a_slice_of_a_stranger_is_refused_and_one_of_a_member_taken() -> None:
    inbox = Inbox(SCHEMA, CODEC, CODEC)
    inbox.expect(THE_PLAN)
    _, start, stop = THE_PLAN.partition[0]
    body = CODEC.encode(torch.ones(stop - start), {}, ((stop - start,),)).body
    given = header(kind=FrameKind.SLICE, part=0, parts=len(THE_PLAN.partition), plan=THE_PLAN.number)
    with pytest.raises(PayloadError, match="slice of a peer that is no member"):
        inbox.check(seal(replace(given, sender=STRANGER.peer), body, STRANGER).data, HEAD)
    _, decoded = inbox.check(seal(given, body, SIGNERS[0]).data, HEAD)
    assert torch.equal(decoded, torch.ones(stop - start))


@pytest.mark.parametrize("kind", [FrameKind.CONTRIBUTION, FrameKind.MERGE])
def test_a_frame_of_a_stranger_is_refused_before_its_body_is_looked_at(kind: FrameKind) -> None:
    inbox = Inbox(SCHEMA, CODEC, CODEC)
    given = replace(header(kind=kind), sender=STRANGER.peer)
    with pytest.raises(PayloadError, match="of a peer that is no member"):
        inbox.check(seal(given, b"anything", STRANGER).data, HEAD)
    inbox.admits = lambda peer: peer == STRANGER.peer  # it has asked to be let in
    assert inbox.max_nbytes(given, HEAD) > 0


def sent(signer: Signer = SIGNERS[0], change_N: torch.Tensor = HONEST, ahead: int = 0, **fields: object) -> Frame:
    made = header(**fields)
    body = CODEC.encode(change_N, {}, SHAPES).body
    return seal(replace(made, sender=signer.peer, round=made.round + ahead), body, signer)


def kept(unpacked: Unpacked, *frames: Frame) -> list[bool]:
    return [unpacked.get(frame) is not None for frame in frames]


def taken(unpacked: Unpacked, *frames: Frame, admitted: Signer | None = None) -> list[bool]:
    inbox = Inbox(SCHEMA, CODEC, CODEC, unpacked=unpacked)
    inbox.admits = lambda peer: admitted is not None and peer == admitted.peer
    for frame in frames:
        assert inbox.check(frame.data, HEAD)[1] is None
    return kept(unpacked, *frames)


def test_what_finds_no_room_is_not_kept_and_what_is_there_stays():
    unpacked = Unpacked(2 * NBYTES)
    assert taken(unpacked, *(sent(signer) for signer in SIGNERS[:3])) == [True, True, False]
    assert unpacked.nbytes == 2 * NBYTES


def test_a_frame_of_a_later_round_takes_the_room_of_earlier_ones_and_never_the_other_way():
    unpacked = Unpacked(2 * NBYTES)
    frames = [sent(SIGNERS[0]), sent(SIGNERS[1]), sent(SIGNERS[0], ahead=1), sent(SIGNERS[2])]
    *earlier, later, refused = taken(unpacked, *frames)
    assert (sorted(earlier), later, refused) == ([False, True], True, False)
    unpacked.forget_before(frames[2].header.round)
    assert kept(unpacked, *frames) == [False, False, True, False]
    unpacked.forget_before(frames[2].header.round + 1)
    assert unpacked.nbytes == 0


def test_a_sender_has_the_room_of_one_frame_a_round_however_many_it_sends():
    unpacked = Unpacked(1 << 20)
    assert taken(unpacked, *(sent(change_N=HONEST * n) for n in (1, 2, 3))) == [False, False, True]
    assert unpacked.nbytes == NBYTES


SPARSE = Codec(parse_compressor("topk(k=64, chunk=4096) >> signmag2"))


def arrived(unpacked: Unpacked, codec: Codec) -> Frame:
    frame = seal(header(), codec.encode(HONEST, {}, SHAPES).body, SIGNERS[0])
    Inbox(SCHEMA, codec, CODEC, unpacked=unpacked).check(frame.data, HEAD)
    return frame


def test_what_a_sparse_change_decodes_to_is_kept_with_its_payloads_and_goes_with_them():
    unpacked = Unpacked(1 << 20)
    frame = arrived(unpacked, SPARSE)
    decoded, payloads = unpacked.decoded(frame), unpacked.get(frame)
    assert payloads is not None
    assert len(decoded) == len(payloads) == len(SHAPES)
    assert unpacked.nbytes == nbytes_of(payloads) + sum(one.nbytes or 0 for one in decoded)
    unpacked.forget_before(frame.header.round + 1)
    assert (unpacked.decoded(frame), unpacked.nbytes) == ((), 0)


@pytest.mark.parametrize("codec", [CODEC, Codec(parse_compressor("signmag2"))], ids=str)
def test_a_dense_change_is_decoded_when_it_is_used(codec):
    unpacked = Unpacked(1 << 20)
    assert unpacked.decoded(arrived(unpacked, codec)) == ()


def test_what_is_decoded_leaves_half_of_the_room_to_payloads():
    probe = Unpacked(1 << 20)
    arrived(probe, SPARSE)
    full, short = Unpacked(2 * probe.nbytes), Unpacked(2 * probe.nbytes - 1)
    assert arrived(full, SPARSE)
    assert full.nbytes == probe.nbytes
    frame = arrived(short, SPARSE)
    assert short.get(frame) is not None
    assert short.decoded(frame) == ()


def test_a_newcomer_is_checked_and_takes_no_room():
    assert taken(Unpacked(1 << 20), sent(STRANGER), admitted=STRANGER) == [False]


@pytest.mark.parametrize("kind", [FrameKind.CONTRIBUTION, FrameKind.MERGE])
def test_of_a_refused_frame_nothing_is_kept(kind):
    unpacked, good = Unpacked(1 << 20), sent(kind=kind)
    nan = bytes(CODEC.encode(HONEST, {}, SHAPES).body).replace(b"\x80?", b"\xc0\x7f")
    bad = seal(good.header, nan, SIGNERS[0])
    with pytest.raises(PayloadError):
        taken(unpacked, bad)
    assert kept(unpacked, bad) == [False]
    assert unpacked.nbytes == 0
    assert taken(unpacked, good) == [True]
