"""All messages of the protocol, and their bytes: the annotations of each class are its layout.

One encoding per value: decoding and encoding again gives the same bytes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Annotated

from decentral.errors import PayloadError
from decentral.wire.codecs import (
    I32,
    PEER_CODEC,
    SIGNATURE_CODEC,
    U8,
    U16,
    U32,
    U64,
    U64_CODEC,
    Bounded,
    Flag,
    Hash,
    Many,
    Maybe,
    Peer,
    Row,
    Signature,
    Struct,
    Text,
    from_bytes,
    layout_of,
    to_bytes,
)
from decentral.wire.keys import DIGEST_NBYTES, SIGNATURE_NBYTES, Digest, PeerId, Signer, peer_name, verify

__all__ = [
    "ADDRESS",
    "LOOKS",
    "MAX_ADDRESS",
    "MAX_ADDRESSES",
    "MAX_MESSAGE_NBYTES",
    "MAX_PEERS",
    "PRIVATE",
    "Asked",
    "Behind",
    "Certificate",
    "Commit",
    "Farewell",
    "FrameRef",
    "Goodbye",
    "JoinRequest",
    "Lease",
    "Message",
    "Missing",
    "Offer",
    "Prepare",
    "Promise",
    "Proposal",
    "Record",
    "ReducePlan",
    "Refusal",
    "Shown",
    "Vote",
    "decode",
    "decode_kept",
    "decode_record",
    "encode",
    "encode_record",
    "farewell_text",
    "hash_of",
    "join_text",
    "promise_text",
    "seal_lease",
    "verify_certificate",
    "vote_text",
]

# ---- the record of a round ----
#
# It is what a commit makes true. Chained by hash, so equal heads mean equal histories.
#
# Crosses the wire: 149 bytes, then 32 per member (twice: this epoch and the next), 89 per frame or contributor and its
# summary, and 48 per range of a reduce.

MAX_PEERS = 1024  # of one epoch: beyond it, groups; bounds every list below
MAX_SUMMARY_NBYTES = 64  # a few norms or a scalar; with every list full, a commit still fits one message

Summary = Annotated[bytes, Bounded(MAX_SUMMARY_NBYTES)]
Range = tuple[PeerId, int, int]  # owner, start, stop: elements [start, stop) of the fragment


@dataclass(frozen=True, slots=True)
class FrameRef:
    """A frame as a record names it."""

    peer: Peer
    frame: Hash
    part: U32
    steps: U32  # inner steps behind the frame
    tokens: U64  # training tokens behind the frame
    based: U64 = 0  # outer step of the anchor that the progress was begun from; the record's own if it is in time
    summary: Summary = b""  # what the method says of it besides; a result has none


def _place(ref: FrameRef) -> tuple[PeerId, int]:
    return ref.peer, ref.part


def _begin(range_: Range) -> tuple[PeerId, int]:
    return range_[0], range_[1]


def _itself(peer: PeerId) -> PeerId:
    return peer


PEERS = Many(PEER_CODEC, MAX_PEERS, _itself)
REFS = Many(Struct(FrameRef), MAX_PEERS, _place)
RANGES = Many(Row((PEER_CODEC, U64_CODEC, U64_CODEC)), MAX_PEERS, _begin)

Peers = Annotated[tuple[PeerId, ...], PEERS]
FrameRefs = Annotated[tuple[FrameRef, ...], REFS]
Partition = Annotated[tuple[Range, ...], RANGES]


@dataclass(frozen=True)
class Record:
    """The decision of a round. Lists are sorted, by peer and then by part, and name nobody twice."""

    run: Hash
    epoch: U64
    round: U64
    outer_step: U64
    fragment: U32
    plan: U32  # number of the reduce plan that made the frames, 0 when there is none
    previous: Hash  # hash of the record before
    base: Hash  # digest of the anchor that the frames start from
    members: Peers
    frames: FrameRefs  # to apply: the contributions, or the owners' results of a reduce
    contributors: FrameRefs  # reduce only: whose contributions the results average
    partition: Partition  # reduce only
    next_members: Peers
    final: Flag  # the run is done after this record

    @cached_property
    def hash(self) -> Digest:
        """blake2b-256 of the record's bytes: what votes sign and the next record names."""
        return hashlib.blake2b(encode_record(self), digest_size=DIGEST_NBYTES).digest()

    def check(self) -> str | None:
        """The rule across fields that this record breaks."""
        if bool(self.partition) != bool(self.contributors):
            return "a reduce names both its contributors and its partition"
        owners = [(owner, part) for part, (owner, _, _) in enumerate(self.partition)]
        if self.partition and [_place(ref) for ref in self.frames] != owners:
            return "the frames of a reduce are its owners' results, one for each range"
        if self.partition and any(ref.summary for ref in self.frames):
            return "a summary is of a contribution, and an owner's result has one"
        return fault_of_ranges(self.partition)


def fault_of_ranges(partition: tuple[Range, ...]) -> str | None:
    """Return the reason why the ranges do not cover the fragment from 0 on, each element once."""
    upto = 0
    for _, start, stop in partition:
        if start != upto or stop <= start:
            return f"range [{start}, {stop}) does not begin where the one before ends, at {upto}, or is empty"
        upto = stop
    return None


def encode_record(record: Record) -> bytes:
    """The record's one encoding. Raises PayloadError for a record that breaks a rule."""
    return to_bytes(record)


def decode_record(data: bytes) -> Record:
    """The record encoded by exactly ``data``. Raises PayloadError."""
    return from_bytes(Record, data)


# ---- small messages around a round ----
#
# Offers, plans, which peers are missing, joining and leaving.
#
# Crosses the wire: 0 to 180 bytes each, a plan 89 per contributor and its summary, and 48 per range.


@dataclass(frozen=True, slots=True)
class Offer:
    """Its sender has a contribution to the round, and this is its frame."""

    epoch: U64
    round: U64
    fragment: U32
    base: Hash  # digest of the anchor it starts from
    frame: Hash
    nbytes: U64  # of the frame
    steps: U32
    tokens: U64
    based: U64 = 0  # outer step of the anchor that the progress was begun from; the round's own if it is in time
    summary: Summary = b""  # what the method says of it besides, for the record to tell everybody alike


@dataclass(frozen=True, slots=True)
class ReducePlan:
    """The ranges that each owner reduces in this round: every owner averages exactly these contributors."""

    epoch: U64
    round: U64
    ballot: U32
    number: U32
    contributors: FrameRefs
    partition: Partition

    def check(self) -> str | None:
        """The rule across fields that this plan breaks."""
        if not self.partition or not self.contributors:
            return "a plan without contributors or without a partition"
        return fault_of_ranges(self.partition)


@dataclass(frozen=True, slots=True)
class Missing:
    """An owner tells the leader whose slices of the plan never came."""

    epoch: U64
    round: U64
    plan: U32
    peers: Peers


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """Its sender stands at this round with this anchor and asks to be a member. Signed, for a leader shows it."""

    round: U64
    digest: Hash
    signature: Signature  # over ``join_text``


@dataclass(frozen=True, slots=True)
class Goodbye:
    """Its sender leaves."""


@dataclass(frozen=True, slots=True)
class Behind:
    """The receiver is behind: the sender stands at ``round`` and can give the commits up to it."""

    round: U64


# ---- messages of a round's ballots ----
#
# Proposals, votes, promises, and the commit that a majority signed.
#
# Crosses the wire: 118 bytes a vote; a proposal or a promise is its record and 70 to 160 bytes; a commit is its record
# and 96 bytes per vote; a farewell its record and 215. Signed one by one is what others must believe without having
# heard it: votes, what a promise or a farewell says was accepted, and who asked to come in.
#
# Source: Lamport, "Paxos Made Simple", 2001.

_VOTE = struct.Struct("<17s32sQQI32s")
_PROMISE = struct.Struct("<20s32sQQIi32s")
_FAREWELL = struct.Struct("<21s32sQQi32s")
_JOIN = struct.Struct("<17s32sQ32s")
NO_SIGNATURE = bytes(SIGNATURE_NBYTES)  # where nothing was accepted, nobody proposed it
MOST_SHOWN = 64  # statements of others that a message repeats: a committee has 21 members


@dataclass(frozen=True, slots=True)
class Shown:
    """A promise or a farewell as another repeats it: all that its signature covers, the record by its hash."""

    peer: Peer
    epoch: U64
    round: U64
    accepted_ballot: I32
    accepted: Hash  # zeros: nothing
    signature: Signature


def _shown_by(shown: Shown) -> PeerId:
    return shown.peer


Statements = Annotated[tuple[Shown, ...], Many(Struct(Shown), MOST_SHOWN, _shown_by)]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request to come in, as a leader repeats it."""

    peer: Peer
    round: U64
    digest: Hash
    signature: Signature  # over ``join_text``


def _asker(asked: Asked) -> PeerId:
    return asked.peer


Requests = Annotated[tuple[Asked, ...], Many(Struct(Asked), MAX_PEERS, _asker)]


@dataclass(frozen=True, slots=True)
class Proposal:
    """The leader of ``ballot`` asks for votes on ``record``, and shows why it may be voted for."""

    ballot: U32
    record: Annotated[Record, Struct(Record)]
    signature: Signature  # the leader's own vote: proof of who proposed it, for whoever carries it on
    promises: Statements = ()  # of a record that is carried on: what the voters had accepted
    farewells: Statements = ()  # of those whom it drops
    requests: Requests = ()  # of those whom it lets in


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
    """The leader of ``ballot`` asks who has accepted what, and shows who else has lost patience before."""

    epoch: U64
    round: U64
    ballot: U32
    promises: Statements = ()


@dataclass(frozen=True, slots=True)
class Promise:
    """Its sender answers no smaller ballot any more, and has accepted this so far."""

    epoch: U64
    round: U64
    ballot: U32
    accepted_ballot: I32  # -1: nothing accepted
    accepted: Annotated[Record | None, Maybe(Struct(Record))]
    proposed: Signature  # of who proposed that, over its ``vote_text``; zeros where nothing was accepted
    signature: Signature  # over ``promise_text``

    def check(self) -> str | None:
        """The rule across fields that this promise breaks."""
        return _fault_of_acceptance(self.accepted_ballot, self.accepted, self.proposed)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Its sender does not vote for a record that was proposed: these members it would not drop or let in."""

    epoch: U64
    round: U64
    ballot: U32
    record: Hash
    peers: Peers
    final: Flag  # the run's terms do not say that it is over


@dataclass(frozen=True, slots=True)
class Farewell:
    """Its sender leaves and votes no more: in ``round`` it has accepted this, in later ones nothing."""

    epoch: U64
    round: U64
    accepted_ballot: I32  # -1: nothing accepted
    accepted: Annotated[Record | None, Maybe(Struct(Record))]
    proposed: Signature  # of who proposed that, over its ``vote_text``; zeros where nothing was accepted
    vote: Signature  # of its sender, the same
    signature: Signature  # over ``farewell_text``

    def check(self) -> str | None:
        """The rule across fields that this farewell breaks."""
        if self.accepted is None and any(self.vote):
            return "a vote without a record"
        if self.accepted is not None and self.accepted.round != self.round:
            return f"a record of round {self.accepted.round} in a farewell in round {self.round}"
        return _fault_of_acceptance(self.accepted_ballot, self.accepted, self.proposed)


def _fault_of_acceptance(ballot: int, record: Record | None, proposed: bytes) -> str | None:
    if ballot < -1 or (ballot == -1) != (record is None):
        return f"accepted ballot {ballot} {'without' if record is None else 'with'} a record"
    return "a proposer's signature without a record" if record is None and any(proposed) else None


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
    farewells: Statements = ()  # of those whom it drops, where they are so many that no majority is left


@dataclass(frozen=True, slots=True)
class _OlderCommit:
    """A commit of version 2."""

    record: Annotated[Record, Struct(Record)]
    certificate: Annotated[Certificate, Struct(Certificate)]


def vote_text(run: Digest, epoch: int, round: int, ballot: int, record_hash: Digest) -> bytes:
    """The bytes that a vote signs: no other message of any run, round or ballot has the same."""
    return _VOTE.pack(b"decentral vote 1\0", run, epoch, round, ballot, record_hash)


def promise_text(run: Digest, epoch: int, round: int, ballot: int, accepted_ballot: int, accepted: Digest) -> bytes:
    """The bytes that a promise signs."""
    return _PROMISE.pack(b"decentral promise 1\0", run, epoch, round, ballot, accepted_ballot, accepted)


def farewell_text(run: Digest, epoch: int, round: int, accepted_ballot: int, accepted: Digest) -> bytes:
    """The bytes that a farewell signs."""
    return _FAREWELL.pack(b"decentral farewell 1\0", run, epoch, round, accepted_ballot, accepted)


def join_text(run: Digest, round: int, digest: Digest) -> bytes:
    """The bytes that a request to come in signs."""
    return _JOIN.pack(b"decentral join 1\0", run, round, digest)


def hash_of(record: Record | None) -> Digest:
    """Give what is signed in the place of a record; zeros where there is none."""
    return bytes(DIGEST_NBYTES) if record is None else record.hash


def verify_certificate(commit: Commit, voters: Collection[PeerId], quorum: int) -> None:
    """Raise PayloadError unless at least ``quorum`` of ``voters`` signed the commit's record.

    A vote by a stranger, a second vote by one peer or a false signature refuses the whole commit.
    """
    record, certificate = commit.record, commit.certificate
    signed = [voter for voter, _ in certificate.votes]
    if len(set(signed)) != len(signed) or not set(signed) <= set(voters):
        raise _bad_commit(record, "a vote is not by one of its voters, or is there twice")
    if len(signed) < quorum:
        raise _bad_commit(record, f"{len(signed)} votes, a majority is {quorum} of {len(voters)}")
    text = vote_text(record.run, record.epoch, record.round, certificate.ballot, record.hash)
    for voter, signature in certificate.votes:
        if not verify(voter, signature, text):
            raise _bad_commit(record, f"the vote of {peer_name(voter)} is not signed by it")


def _bad_commit(record: Record, what: str) -> PayloadError:
    return PayloadError(f"commit of round {record.round}: {what}; drop it and its sender")


# ---- leases ----
#
# A lease is a peer's signed word that it is here, where to find it and how far it is.
#
# Crosses the wire, mostly as a value in the DHT: about 200 bytes plus the addresses. It expires unless renewed. Anybody
# may carry it, nobody can alter it. The sequence number rises with every renewal, so an old lease never replaces a new
# one.

MAX_ADDRESSES = 16
MAX_ADDRESS = 256  # characters
LOOKS, NO_PART = 1, 2  # both ends of a part that is empty, in a lease

ADDRESS = Text(MAX_ADDRESS)

PRIVATE = 1  # flag of ``state``: others reach this peer through relays only


@dataclass(frozen=True, slots=True)
class Lease:
    """Made by ``seal_lease``; one that was read is signed by ``peer``."""

    run: Hash
    peer: Peer
    sequence: U64
    ttl: U32  # seconds from when it was made
    addresses: Annotated[tuple[str, ...], Many(ADDRESS, MAX_ADDRESSES)]  # multiaddrs, best first
    epoch: U64
    round: U64
    digest: Hash  # of the anchor
    state: U8  # flags, PRIVATE the only one so far; others are passed on and mean nothing
    uplink: U64  # bit/s, measured; 0: not yet
    version: Annotated[str, Text(32)]  # of the library
    first: U16 = 0  # fragments that it trains, from this one to the one before ``stop``
    stop: U16 = 0  # 0: it trains all; ``first``: none
    signature: Signature = bytes(SIGNATURE_NBYTES)

    def __hash__(self) -> int:
        """A signature is of all else, and its hash is kept: a list of a large swarm's leases is written by theirs."""
        return hash(self.signature)

    @property
    def part(self) -> range | None:
        """The fragments that it trains; None: all."""
        return range(self.first, self.stop) if self.stop else None

    @property
    def looks(self) -> bool:
        """It looks for others to share a replica with, and trains none."""
        return self.first == self.stop == LOOKS

    def check(self) -> str | None:
        """The rule across fields that this lease breaks."""
        if self.first > self.stop:
            return f"it trains fragments {self.first} to {self.stop}, which are none"
        return None if verify(self.peer, self.signature, _signed_text(self)) else "not signed by the peer it names"


def seal_lease(lease: Lease, signer: Signer) -> Lease:
    """The same lease, signed. Raises PayloadError when it is another peer's, or a field breaks its rule."""
    if lease.peer != signer.peer:
        raise PayloadError("seal_lease: lease.peer is not the signer's peer; a peer signs its own lease only")
    return replace(lease, signature=signer.sign(_signed_text(lease)))


def _signed_text(lease: Lease) -> bytes:
    """Return the text that the signature covers: every field before it, named so that no other signed text begins
    alike.
    """
    return b"decentral lease 2\0" + layout_of(Lease).fields_to_bytes(lease)[:-SIGNATURE_NBYTES]


# ---- the bytes of any message ----
#
# Crosses the wire: a type byte, a version byte, then the fields that its class declares. Bounded by
# ``MAX_MESSAGE_NBYTES`` before anything is read. Raises PayloadError and nothing else.

VERSION = 3  # 2 signed votes only, and farewells where they held one; 1 was never released
_COMMITS_WITHOUT_FAREWELLS = 2  # the version of the commits in older journals
_SMALL = 1 << 10  # bytes of a message of which many are remembered: leases, offers, votes
MAX_MESSAGE_NBYTES = 640 * 1024  # a proposal with every list full takes 524 kB

Message = (
    Offer
    | ReducePlan
    | Missing
    | Proposal
    | Vote
    | Prepare
    | Promise
    | Commit
    | JoinRequest
    | Goodbye
    | Behind
    | Lease
    | Farewell
    | Refusal
)

# Numbers are for ever: a message that goes away leaves its number unused, as 12 to 14 are.
_TYPES: dict[int, type[Message]] = {
    1: Offer,
    2: ReducePlan,
    3: Missing,
    4: Proposal,
    5: Vote,
    6: Prepare,
    7: Promise,
    8: Commit,
    9: JoinRequest,
    10: Goodbye,
    11: Behind,
    15: Lease,
    16: Farewell,
    17: Refusal,
}
_CODES = {type_: code for code, type_ in _TYPES.items()}


def encode(message: Message) -> bytes:
    """The message's one encoding. Raises PayloadError for a message that breaks a rule of its fields."""
    return bytes((_CODES[type(message)], VERSION)) + to_bytes(message)


def decode(data: bytes | memoryview) -> Message:
    """The message encoded by exactly ``data``; a lease's signature is checked. Raises PayloadError.

    What came lately is not read again: one lease comes from many peers, one commit from all who help.
    """
    return (_decode_small if len(data) <= _SMALL else _decode_large)(bytes(data))


def decode_kept(data: bytes) -> Commit:
    """A commit as a journal has it: of this version, or of the one before. Raises PayloadError."""
    if data[:2] == bytes((_CODES[Commit], _COMMITS_WITHOUT_FAREWELLS)):
        older = from_bytes(_OlderCommit, data[2:])
        return Commit(older.record, older.certificate)
    message = decode(data)
    if not isinstance(message, Commit):
        raise PayloadError(f"journal holds a {type(message).__name__}, not a commit; remove it")
    return message


def _decode(data: bytes) -> Message:
    if not 2 <= len(data) <= MAX_MESSAGE_NBYTES:
        raise PayloadError(f"message of {len(data)} bytes, want 2 to {MAX_MESSAGE_NBYTES}; drop it and its sender")
    code, version = data[0], data[1]
    type_ = _TYPES.get(code)
    if type_ is None:
        raise PayloadError(f"message of unknown type {code}; drop it and its sender")
    if version != VERSION:
        what = f"{type_.__name__} in version {version}, this library reads {VERSION}"
        raise PayloadError(f"{what}: one of the two is too old; update it")
    return from_bytes(type_, data[2:])


_decode_small = lru_cache(maxsize=2 * MAX_PEERS)(_decode)
_decode_large = lru_cache(maxsize=8)(_decode)
