"""What a scenario gave, from the events that its peers wrote down."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Row = Mapping[str, Any]  # Any: one line of a peer's events.jsonl

_STANDING = ("commit", "membership", "resynced")  # events that say which round of the chain a peer has behind it


@dataclass(slots=True)
class Outcome:
    """What a scenario gave."""

    scenario: str
    missing: str | None
    asked: int  # rounds
    least_with_all: float = 0.75  # share of the rounds asked for
    committed: int = 0  # rounds that every peer committed, or caught up with
    with_all: int = 0  # of those, the ones that named a frame of every peer
    contributed: dict[str, int] = field(default_factory=dict)  # rounds that named a frame of this peer
    first_frame: float | None = None  # s from the start of the last peer to the first commit of two frames
    seconds: float = 0.0
    mbit: float = 0.0  # of the uplink that was used most in any one second
    share: float = 0.0  # of that uplink
    mean_share: float = 0.0  # of the busiest uplink, from the first to the last commit
    equal: bool = True  # whether all peers committed the same records
    sent: dict[str, float] = field(default_factory=dict)  # MB over each uplink, by the seats that share it
    paths: dict[str, str] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)  # of the peers that ended badly or were left behind: how

    @property
    def works(self) -> bool:
        """Whether 99 % of the rounds were committed, alike on all peers, and enough of them with everybody's frame."""
        enough = self.committed >= 0.99 * self.asked and self.with_all >= self.least_with_all * self.asked
        return self.equal and not self.ends and enough

    def judge(self, records: Sequence[Sequence[Row]], names: Mapping[str, str], began: float) -> None:
        """Count what the records name; ``names``: the peer of each seat."""
        named = [rows[0]["contributors"] for rows in records]
        self.committed = len(records)
        self.contributed = {seat: sum(peer in found for found in named) for seat, peer in names.items()}
        self.with_all = sum(len(found) == len(names) for found in named)
        self.equal = all(len({row["anchor"] for row in rows}) == 1 for rows in records)
        shared = [row["mono"] for rows in records for row in rows if len(row["contributors"]) > 1]
        self.first_frame = round(min(shared) - began, 2) if shared else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"works": self.works}


def reached(rows: Iterable[Row]) -> int:
    """The last round of the chain that a peer has behind it."""
    return max((int(row["round"]) for row in rows if row["event"] in _STANDING), default=0)


def shared_records(peers: Iterable[Iterable[Row]]) -> list[list[Row]]:
    """Each record that moved the anchor and that every peer got to, as the line of each peer that wrote of it.

    A peer that missed a commit and caught up says only where it stands then.
    """
    everybody = [list(rows) for rows in peers]
    everywhere = min(map(reached, everybody))
    found: dict[int, list[Row]] = {}
    for row in (row for rows in everybody for row in rows if row["event"] == "commit"):
        if row["round"] <= everywhere:
            found.setdefault(row["round"], []).append(row)
    return [found[number] for number in sorted(found)]
