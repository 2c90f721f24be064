"""Every control message, and its bytes: a type byte, a version byte, then the fields that its class
declares.

Bounded by ``MAX_MESSAGE_NBYTES`` before anything is read. One encoding per value: decoding and encoding
again gives the same bytes. Raises PayloadError and nothing else.
"""

from __future__ import annotations

from functools import lru_cache

from decentral.errors import PayloadError
from decentral.wire.control import (
    Behind,
    Goodbye,
    JoinRequest,
    Missing,
    Offer,
    ReducePlan,
)
from decentral.wire.layout import from_bytes, to_bytes
from decentral.wire.lease import Lease, seal_lease
from decentral.wire.records import MAX_PEERS, FrameRef, Record, decode_record, encode_record
from decentral.wire.votes import (
    Certificate,
    Commit,
    Farewell,
    Prepare,
    Promise,
    Proposal,
    Vote,
    verify_certificate,
    vote_text,
)

__all__ = [
    "MAX_MESSAGE_NBYTES",
    "MAX_PEERS",
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
    "Vote",
    "decode",
    "decode_record",
    "encode",
    "encode_record",
    "seal_lease",
    "verify_certificate",
    "vote_text",
]

VERSION = 2  # 1 had no age and no summary of contributions and was never released
_SMALL = 1 << 10  # bytes of a message of which many are remembered: leases, offers, votes
MAX_MESSAGE_NBYTES = 512 * 1024  # a commit with every list full takes 461 kB

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
