"""A frame: one peer's signed bytes for one round: a fixed header, then a body of bounded size.

Crosses the wire: ``HEADER_NBYTES`` bytes, then the body. No length field of its own (a stream puts a u32 before it):
the local schema says how long the body of a header may be, so a peer cannot make this one allocate. The header holds
the body's hash, and the signature covers the header, so one signature check covers everything and every value has one
encoding.

Layout, little-endian: magic "DCFR", version u16, kind u16, run 32, epoch u64, round u64, fragment u32, part u32, parts
u32, plan u32, base 32, sender 32, steps u32, states u32, tokens u64, claims 32, body hash 32 (blake2b-256), signature
64.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from enum import IntEnum
from functools import cached_property

from decentral.errors import PayloadError
from decentral.wire.keys import DIGEST_NBYTES, SIGNATURE_NBYTES, Digest, PeerId, Signer, verify

MAGIC = b"DCFR"
MAX_STATES = 7  # channels beside the change: a method has eight at most
VERSION = 3  # 1 had bodies without entropy coding, 2 headers without claims; neither was ever released

_FIELDS = struct.Struct("<4sHH32sQQIIII32s32sIIQ32s")
_AGE = struct.Struct("<Q")
_SIGNED_NBYTES = _FIELDS.size + DIGEST_NBYTES
HEADER_NBYTES = _SIGNED_NBYTES + SIGNATURE_NBYTES


class FrameKind(IntEnum):
    """The kind of a frame's body."""

    CONTRIBUTION = 1  # a peer's compressed pseudo-gradient of a fragment
    SLICE = 2  # the part of a contribution that one owner reduces
    RESULT = 3  # an owner's mean over its part
    SWAP = 4  # a gossip pair's exchange
    MERGE = 5  # parameters of a peer that trained on alone


@dataclass(frozen=True, slots=True)
class Header:
    """The kind of the body and the round, fragment and sender that it belongs to; all of it is signed."""

    kind: FrameKind
    run: Digest
    epoch: int
    round: int
    fragment: int
    part: int  # index below ``parts``; 0 of 1 for a whole fragment
    parts: int
    plan: int  # number of the reduce plan, 0 when there is none
    base: Digest  # anchor that the body starts from
    sender: PeerId
    steps: int  # inner steps behind the body
    tokens: int  # training tokens behind the body
    states: int = 0  # channels in the body beside the change
    claims: Digest = bytes(DIGEST_NBYTES)  # see ``claims_of``; zeros in a swap, which no record names

    @property
    def channels(self) -> int:
        """Vectors in the body."""
        return 1 + self.states


@dataclass(frozen=True)
class Frame:
    """Made by ``seal`` or ``parse``, so always whole and signed. Its bytes are there once."""

    header: Header
    data: bytes = field(repr=False)  # as it crosses the wire

    @property
    def body(self) -> memoryview:
        """Return the bytes behind the header."""
        return memoryview(self.data)[HEADER_NBYTES:]

    @cached_property
    def hash(self) -> Digest:
        """As ``frame_hash``."""
        return frame_hash(self.data)

    @property
    def nbytes(self) -> int:
        """Size on the wire."""
        return len(self.data)


def frame_hash(data: bytes) -> Digest:
    """blake2b-256 over every byte of a frame: what offers and records call it by."""
    return _digest(data)


def claims_of(based: int, summary: bytes) -> Digest:
    """Return the header's age and summary, which its sender offers beside it: a record must name the same."""
    return _digest(_AGE.pack(based), summary)


def seal(header: Header, body: bytes | memoryview, signer: Signer, tail: bytes = b"") -> Frame:
    """Sign ``body``, with ``tail`` behind it, under ``header``, whose sender must be the signer.

    Raises PayloadError when a field does not fit its place.
    """
    if header.sender != signer.peer:
        raise PayloadError("seal: header.sender is not the signer; a frame is signed by who it is from")
    _check_fields(header)
    kind, *fields, steps, tokens, states, claims = astuple(header)
    signed = _FIELDS.pack(MAGIC, VERSION, kind, *fields, steps, states, tokens, claims) + _digest(body, tail)
    return Frame(header, b"".join((signed, signer.sign(signed), body, tail)))


def parse(data: bytes | memoryview, max_nbytes: Callable[[Header], int]) -> Frame:
    """Read and check one frame: nothing of ``data`` is trusted before its signature holds.

    ``max_nbytes`` gives the largest size of a body that belongs to a header, from the local schema; it may raise
    PayloadError itself for a header that belongs to nothing here. Cheap checks come first.
    """
    header = parse_header(data)
    most = max_nbytes(header)
    if len(data) - HEADER_NBYTES > most:
        found = len(data) - HEADER_NBYTES
        raise _bad(f"body of {found} bytes, the schema allows {most} for this {header.kind.name}")
    if _digest(memoryview(data)[HEADER_NBYTES:]) != data[_FIELDS.size : _SIGNED_NBYTES]:
        raise _bad("the body does not have the hash that its header names")
    return Frame(_signed_by_sender(header, data), bytes(data))


def parse_header(data: bytes | memoryview) -> Header:
    """The header at the start of ``data``, its fields checked and its signature not yet."""
    if len(data) < HEADER_NBYTES:
        raise _bad(f"{len(data)} bytes, a header alone takes {HEADER_NBYTES}")
    magic, version, kind, *fields = _FIELDS.unpack_from(data)
    if magic != MAGIC:
        raise _bad(f"magic {magic!r}, want {MAGIC!r}")
    if version != VERSION:
        raise _bad(f"version {version}, this library reads {VERSION}: one of the two is too old")
    if kind not in FrameKind.__members__.values():
        raise _bad(f"unknown kind {kind}")
    run, epoch, round_, fragment, part, parts, plan, base, sender, steps, states, tokens, claims = fields
    if states > MAX_STATES:
        raise _bad(f"{states} channels beside the change, at most {MAX_STATES}")
    counted = (steps, tokens, states, claims)
    header = Header(FrameKind(kind), run, epoch, round_, fragment, part, parts, plan, base, sender, *counted)
    if part >= parts:
        raise _bad(f"part {part} of {parts}")
    return header


def signed_header(data: bytes | memoryview) -> Header:
    """The header at the start of ``data``, its signature checked; the body may be another. Raises PayloadError."""
    return _signed_by_sender(parse_header(data), data)


def _signed_by_sender(header: Header, data: bytes | memoryview) -> Header:
    if not verify(header.sender, bytes(data[_SIGNED_NBYTES:HEADER_NBYTES]), bytes(data[:_SIGNED_NBYTES])):
        raise _bad("not signed by the sender it names")
    return header


def _check_fields(header: Header) -> None:
    """Refuse what struct would silently pad or cut, or refuse with an error of its own."""
    if {len(one) for one in (header.run, header.base, header.sender, header.claims)} != {DIGEST_NBYTES}:
        raise PayloadError("seal: run, base, sender and claims are 32 bytes each")
    short = (header.fragment, header.part, header.parts, header.plan, header.steps, header.states)
    long = (header.epoch, header.round, header.tokens)
    if not all(0 <= n < 2**32 for n in short) or not all(0 <= n < 2**64 for n in long):
        raise PayloadError(f"seal: a number of {header} does not fit its u32, or u64 (epoch, round, tokens)")
    if header.part >= header.parts:
        raise PayloadError(f"seal: part {header.part} of {header.parts}; parts are counted from 0")


def _digest(body: bytes | memoryview, tail: bytes = b"") -> Digest:
    made = hashlib.blake2b(body, digest_size=DIGEST_NBYTES)
    made.update(tail)
    return made.digest()


def _bad(what: str) -> PayloadError:
    return PayloadError(f"frame refused: {what}; drop it and its sender")
