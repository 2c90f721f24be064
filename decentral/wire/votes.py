"""Messages of a round's ballots: proposals, votes, promises, and the commit that a majority signed.

Crosses the wire: 118 bytes a vote; a proposal or a promise is its record and a few bytes; a commit is its record and 96
bytes per vote; a farewell its record and 79. Only votes are signed one by one: they are what others must believe
without having heard them.

Source: Lamport, "Paxos Made Simple", 2001.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated

from decentral.errors import PayloadError
from decentral.wire.codecs import I32, PEER_CODEC, SIGNATURE_CODEC, U32, U64, Hash, Many, Maybe, Row, Signature
from decentral.wire.keys import Digest, PeerId, peer_name, verify
from decentral.wire.layout import Struct
from decentral.wire.records import MAX_PEERS, Record

_VOTE = struct.Struct("<17s32sQQI32s")


@dataclass(frozen=True, slots=True)
class Proposal:
    """The leader of ``ballot`` asks for votes on ``record``."""

    ballot: U32
    record: Annotated[Record, Struct(Record)]


@dataclass(frozen=True, slots=True)
class Vote:
    """Its sender holds every frame of the record with that hash and has accepted it, durably."""

    epoch: U64
    round: U64
    ballot: U32
    record: Hash
    signature: Signature  # over ``vote_text``


@dataclass(frozen=True, slots=True)
class Prepare:
    """The leader of ``ballot`` asks who has accepted what."""

    epoch: U64
    round: U64
    ballot: U32


@dataclass(frozen=True, slots=True)
class Promise:
    """Its sender answers no smaller ballot any more, and has accepted this so far."""

    epoch: U64
    round: U64
    ballot: U32
    accepted_ballot: I32  # -1: nothing accepted
    accepted: Annotated[Record | None, Maybe(Struct(Record))]

    def check(self) -> str | None:
        """The rule across fields that this promise breaks."""
        return _accepted(self.accepted_ballot, self.accepted)


@dataclass(frozen=True, slots=True)
class Farewell:
    """Its sender leaves and votes no more: in ``round`` it has accepted this, in later ones nothing."""

    round: U64
    accepted_ballot: I32  # -1: nothing accepted
    accepted: Annotated[Record | None, Maybe(Struct(Record))]
    signature: Signature  # over ``vote_text``; zeros where nothing was accepted

    def check(self) -> str | None:
        """The rule across fields that this farewell breaks."""
        if self.accepted is None and any(self.signature):
            return "a signature without a record"
        if self.accepted is not None and self.accepted.round != self.round:
            return f"a record of round {self.accepted.round} in a farewell in round {self.round}"
        return _accepted(self.accepted_ballot, self.accepted)


def _accepted(ballot: int, record: Record | None) -> str | None:
    if ballot < -1 or (ballot == -1) != (record is None):
        return f"accepted ballot {ballot} {'without' if record is None else 'with'} a record"
    return None


def _voter(vote: tuple[PeerId, bytes]) -> PeerId:
    return vote[0]


@dataclass(frozen=True, slots=True)
class Certificate:
    """The votes of one ballot, sorted by voter: proof of a majority to those who were not there."""

    ballot: U32
    votes: Annotated[tuple[tuple[PeerId, bytes], ...], Many(Row((PEER_CODEC, SIGNATURE_CODEC)), MAX_PEERS, _voter)]


@dataclass(frozen=True, slots=True)
class Commit:
    """A record and the proof that it is decided."""

    record: Annotated[Record, Struct(Record)]
    certificate: Annotated[Certificate, Struct(Certificate)]


def vote_text(run: Digest, epoch: int, round: int, ballot: int, record_hash: Digest) -> bytes:
    """The bytes that a vote signs: no other message of any run, round or ballot has the same."""
    return _VOTE.pack(b"decentral vote 1\0", run, epoch, round, ballot, record_hash)


def verify_certificate(commit: Commit, voters: Collection[PeerId], quorum: int) -> None:
    """Raise PayloadError unless at least ``quorum`` of ``voters`` signed the commit's record.

    A vote by a stranger, a second vote by one peer or a false signature refuses the whole commit.
    """
    record, certificate = commit.record, commit.certificate
    signed = [voter for voter, _ in certificate.votes]
    if len(set(signed)) != len(signed) or not set(signed) <= set(voters):
        raise _bad(record, "a vote is not by one of its voters, or is there twice")
    if len(signed) < quorum:
        raise _bad(record, f"{len(signed)} votes, a majority is {quorum} of {len(voters)}")
    text = vote_text(record.run, record.epoch, record.round, certificate.ballot, record.hash)
    for voter, signature in certificate.votes:
        if not verify(voter, signature, text):
            raise _bad(record, f"the vote of {peer_name(voter)} is not signed by it")


def _bad(record: Record, what: str) -> PayloadError:
    return PayloadError(f"commit of round {record.round}: {what}; drop it and its sender")
