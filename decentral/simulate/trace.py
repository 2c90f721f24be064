"""The trace of a simulated run: what happened, in order, which is all that its checker reads besides the peers' disks.

One entry is one event of one peer at one virtual time. The hash over all entries names the run: equal seeds give equal
hashes in every process, or something took its randomness, its clock or its order from outside.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from decentral.wire.messages import Commit


@dataclass(frozen=True, slots=True)
class Entry:
    """An event. ``tensors`` are not hashed by value: what they led to is, through the digests of commits."""

    time: float  # s of virtual time
    host: int
    life: int  # how often the host had been started
    event: str
    fields: dict[str, Any]  # Any: what the event says, as JSON takes it
    tensors: dict[str, Tensor]


class Trace:
    """An append-only list of entries and their hash."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: list[Entry] = []
        self._hash = hashlib.blake2b(digest_size=16)
        self.commits: dict[bytes, Commit] = {}  # by the record's hash
        self.frames: dict[bytes, bytes] = {}  # by their hash

    def note(self, host: int, life: int, event: str, tensors: dict[str, Tensor] | None = None, **fields: Any) -> None:
        """Add one event. Fields are hashed in their canonical JSON."""
        entry = Entry(round(self._clock(), 6), host, life, event, fields, tensors or {})
        text = json.dumps([entry.time, host, life, event, fields], sort_keys=True, default=_plain)
        self._hash.update(text.encode() + b"\n")
        self._entries.append(entry)

    def keep(self, commit: Commit, frames: Sequence[bytes]) -> None:
        """Keep what a peer wrote to its disk: a commit and the frames it names."""
        self.commits[commit.record.hash] = commit
        self.frames |= {ref.frame: data for ref, data in zip(commit.record.frames, frames, strict=True)}

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def of(self, event: str) -> Iterator[Entry]:
        """The entries of one kind, in order."""
        return (entry for entry in self._entries if entry.event == event)

    @property
    def hash(self) -> str:
        """The hash over all entries so far, in hex."""
        return self._hash.hexdigest()


def _plain(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else repr(value)


# ---- the verdict on a trace ----
#
# Counts of broken guarantees, and a sentence for each.


@dataclass(slots=True)
class Verdict:
    """The findings; all zero and empty when every guarantee held."""

    divergence: int = 0  # rounds with two records, or one record with two anchors
    lost_updates: int = 0  # inner steps of peers that never went down, gone
    duplicated_updates: int = 0  # inner steps that moved the anchor twice
    problems: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """Return whether nothing was broken."""
        return not (self.divergence or self.lost_updates or self.duplicated_updates or self.problems)

    def say(self, problem: str) -> None:
        """Note one broken guarantee."""
        self.problems.append(problem)
