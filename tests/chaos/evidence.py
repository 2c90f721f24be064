"""What the peers wrote down, read from outside: journals by their bytes, events by their lines.

Nothing here asks a peer. Journals are compacted, so they are read again and again while the run goes on; a record
that was ever durable anywhere stays in the evidence, whatever becomes of the peer that held it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from decentral.errors import PayloadError
from decentral.observe.events import read_events
from decentral.wire.messages import Commit, decode_kept

_LENGTH = struct.Struct("<I")
_SEAL_NBYTES = 16


def journal_entries(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """(seal, body) of the entries that are whole: u32 length, blake2b-128 of length and body, body."""
    at = 0
    while at + _LENGTH.size + _SEAL_NBYTES <= len(data):
        (nbytes,) = _LENGTH.unpack_from(data, at)
        start = at + _LENGTH.size + _SEAL_NBYTES
        seal, body = data[at + _LENGTH.size : start], data[start : start + nbytes]
        if len(body) < nbytes or blake2b(data[at : at + _LENGTH.size] + body, digest_size=16).digest() != seal:
            return
        yield seal, body
        at = start + nbytes


@dataclass(slots=True)
class Evidence:
    """Everything known about every round of the chain."""

    records: dict[int, dict[str, set[str]]] = field(default_factory=dict)  # round -> record hash -> who holds it
    anchors: dict[str, dict[str, set[str]]] = field(default_factory=dict)  # record hash -> anchor after it -> who
    events: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by peer, in order
    _seen: dict[str, set[bytes]] = field(default_factory=dict)  # seals, by peer

    def read_journal(self, name: str, path: Path) -> None:
        """Take what is new in a journal; one that is being written to, or was just replaced, is no trouble."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return
        seen = self._seen.setdefault(name, set())
        for seal, body in journal_entries(data):
            if seal not in seen:
                seen.add(seal)
                self._take_commit(f"{name}'s journal", body)

    def read_events(self, name: str, folder: Path) -> None:
        """Take all events of a peer, those of its dead incarnations included."""
        rows = self.events[name] = list(read_events(folder))
        for row in rows:
            if "record" not in row:
                continue
            if row["event"] in ("commit", "membership", "resynced"):
                self.saw_record(int(row["round"]), str(row["record"]), name)
            if row.get("anchor"):
                self.saw_anchor(str(row["record"]), str(row["anchor"]), name)

    def saw_record(self, round_: int, record: str, who: str) -> None:
        """Somebody's round ``round_`` is ``record``."""
        self.records.setdefault(round_, {}).setdefault(record, set()).add(who)

    def saw_anchor(self, record: str, anchor: str, who: str) -> None:
        """Somebody's anchor after ``record`` has this digest."""
        self.anchors.setdefault(record, {}).setdefault(anchor, set()).add(who)

    def _take_commit(self, who: str, body: bytes) -> None:
        try:
            commit = decode_kept(body)
        except PayloadError:
            commit = None
        if not isinstance(commit, Commit):
            self.saw_record(-1, f"undecodable entry {body[:16].hex()}", who)
            return
        record = commit.record
        self.saw_record(record.round, record.hash.hex(), who)
        self.saw_anchor(record.previous.hex(), record.base.hex(), who)
