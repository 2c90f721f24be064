"""Whose frames are taken: what strangers sign is kept for nobody."""

from dataclasses import replace

import pytest
import torch

from decentral.compressors import parse_compressor
from decentral.errors import PayloadError
from decentral.replica.codec import Codec
from decentral.rounds.inbox import Inbox
from decentral.wire.frames import FrameKind, seal
from decentral.wire.keys import Signer
from tests.fuzz.targets import HEAD, SCHEMA, SIGNERS, THE_PLAN
from tests.kit.builders import header


def test_a_slice_of_a_stranger_is_refused_and_one_of_a_member_taken() -> None:
    codec = Codec(parse_compressor("none"))
    inbox = Inbox(SCHEMA, codec, codec)
    inbox.expect(THE_PLAN)
    stranger = Signer(bytes([77]) * 32)
    fields = {"kind": FrameKind.SLICE, "part": 0, "parts": len(THE_PLAN.partition), "plan": THE_PLAN.number}
    _, start, stop = THE_PLAN.partition[0]
    body = codec.encode(torch.ones(stop - start), {}, ((stop - start,),)).body
    given = header(**fields)
    with pytest.raises(PayloadError, match="slice of a peer that is no member"):
        inbox.check(seal(replace(given, sender=stranger.peer), body, stranger).data, HEAD)
    _, decoded = inbox.check(seal(given, body, SIGNERS[0]).data, HEAD)
    assert torch.equal(decoded, torch.ones(stop - start))


@pytest.mark.parametrize("kind", [FrameKind.CONTRIBUTION, FrameKind.MERGE])
def test_a_frame_of_a_stranger_is_refused_before_its_body_is_looked_at(kind: FrameKind) -> None:
    codec = Codec(parse_compressor("none"))
    inbox = Inbox(SCHEMA, codec, codec)
    stranger = Signer(bytes([77]) * 32)
    given = replace(header(kind=kind), sender=stranger.peer)
    with pytest.raises(PayloadError, match="of a peer that is no member"):
        inbox.check(seal(given, b"anything", stranger).data, HEAD)
    inbox.admits = lambda peer: peer == stranger.peer  # it has asked to be let in
    assert inbox.max_nbytes(given, HEAD) > 0
