"""The acceptor of one round's single-decree Paxos: what this peer promised and what it accepted.

Two quorums share a peer, so a value that some quorum accepted is seen by every later leader, who must carry it
on. The state is made durable before any answer leaves, or a restarted peer could vote twice.

Source: Lamport, "Paxos Made Simple", 2001, section 2.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from decentral.errors import PayloadError
from decentral.wire.messages import Record, decode_record, encode_record

_HEAD = struct.Struct("<Qqq")  # round, promised, accepted ballot (-1: none)


@dataclass(frozen=True, slots=True)
class Acceptor:
    """Immutable: a changed acceptor is a new one, so the durable copy and the live one cannot drift apart."""

    round: int
    promised: int = 0  # no smaller ballot is answered any more; ballot 0 needs no promise
    accepted_ballot: int = -1
    accepted: Record | None = None

    def continues(self, round_: int, head: bytes) -> bool:
        """Whether this is the state of the round after ``round_`` on the chain whose head is ``head``."""
        return self.round == round_ + 1 and (self.accepted is None or self.accepted.previous == head)

    def promise(self, ballot: int) -> Acceptor | None:
        """Promise ``ballot``, or None when a higher one was promised already."""
        if ballot < self.promised:
            return None
        return Acceptor(self.round, ballot, self.accepted_ballot, self.accepted)

    def accept(self, ballot: int, record: Record) -> Acceptor | None:
        """Accept ``record``, or None when a higher ballot was promised or this one holds another record."""
        if ballot < self.promised or ballot < self.accepted_ballot:
            return None
        if ballot == self.accepted_ballot and record != self.accepted:
            return None
        return Acceptor(self.round, ballot, ballot, record)

    def to_bytes(self) -> bytes:
        """The durable form."""
        head = _HEAD.pack(self.round, self.promised, self.accepted_ballot)
        return head if self.accepted is None else head + encode_record(self.accepted)

    @classmethod
    def from_bytes(cls, data: bytes) -> Acceptor:
        """Read the durable form back. Raises PayloadError on a damaged one, and on one of another version."""
        if len(data) < _HEAD.size:
            raise PayloadError(f"acceptor state of {len(data)} bytes is cut short; remove the file")
        round_, promised, ballot = _HEAD.unpack_from(data)
        rest = data[_HEAD.size :]
        return cls(round_, promised, ballot, _record(rest) if rest else None)


def _record(data: bytes) -> Record:
    try:
        return decode_record(data)
    except PayloadError as error:
        raise PayloadError(
            f"acceptor state does not parse ({str(error).partition(';')[0]}): it is damaged, or another version of "
            "decentral wrote it; go on with that version, or begin in another folder"
        ) from None
