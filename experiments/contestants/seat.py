"""A worker's place in a match: what it is told on its command line, and the folder by which it hears of the others.

The folder stands for the mail in which people send each other an address; nothing else goes through it.
"""

from __future__ import annotations

import json
import os
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments.contestants.terms import Match

_LOOK = 0.05  # s between two looks


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """``first``: whether this peer is the one that the others look for."""

    match: Match
    rank: int
    address: str  # IPv4 of this peer
    first_address: str  # IPv4 of peer 0
    interface: str  # whose bytes count
    folder: str
    service: str = ""  # address of what the contestant needs besides its peers

    @property
    def first(self) -> bool:
        """Whether this is the peer by which others find the run."""
        return self.rank == 0

    @property
    def late(self) -> bool:
        """Whether the match goes on already."""
        return self.rank >= self.match.peers

    def to_line(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))

    @classmethod
    def of_line(cls, line: str) -> Seat:
        """From the command line."""
        given = json.loads(line)
        return cls(**given | {"match": Match(**given["match"])})

    def path(self, name: str) -> Path:
        """Of a file that all workers see."""
        return Path(self.folder, name)

    def hand_out(self, name: str, text: str) -> None:
        """Let the others read it, whole."""
        written = self.path(f".{name}-{self.rank}")
        written.write_text(text)
        os.replace(written, self.path(name))

    def await_text(self, name: str) -> str:
        """What somebody hands out; as long as it takes: who started the worker ends it."""
        nobody = threading.Event()
        while not self.path(name).exists():
            nobody.wait(_LOOK)
        return self.path(name).read_text()
