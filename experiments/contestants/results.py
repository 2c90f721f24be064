"""The file of what was played, and what a match comes to over its peers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.contestants.outcome import Peer
from experiments.contestants.terms import Match

RESULTS = Path(__file__).with_name("results.jsonl")
UNKNOWN = 8.0  # bits per byte: knowing nothing


@dataclass(frozen=True, slots=True)
class Result:
    """A match that was played. ``load``: of the machine in its last minute, the match's own included."""

    match: Match
    peers: list[Peer]
    load: float

    @property
    def at_end(self) -> list[Peer]:
        """Those whose part was not ended by a kill of ours."""
        return [peer for peer in self.peers if peer.ended != "killed" and peer.curve]

    @property
    def bits(self) -> float:
        """Held-out bits per byte of the last weights, mean over the peers that nobody killed."""
        return fmean([peer.curve[-1][3] for peer in self.at_end] or [UNKNOWN])

    @property
    def worst(self) -> float:
        """The same of the worst peer."""
        return max([peer.curve[-1][3] for peer in self.at_end] or [UNKNOWN])

    @property
    def computing(self) -> float:
        """Share of the time that those of the beginning spent on steps, of whom nobody was killed."""
        all_along = [peer for peer in self.at_end if peer.rank < self.match.peers]
        return fmean([peer.computing for peer in all_along] or [0.0]) / self.match.seconds

    @property
    def overrun(self) -> float:
        """Seconds of computing beyond the pace, mean over peers: what a busy machine took."""
        return fmean(peer.overrun for peer in self.peers)

    @property
    def sent(self) -> int:
        """Bytes of all peers together."""
        return sum(peer.sent for peer in self.peers)

    @property
    def tokens(self) -> int:
        """Trained on by all peers together."""
        return sum(peer.tokens for peer in self.peers)

    def curve(self) -> list[tuple[float, float, float]]:
        """Minutes, megabytes that all have sent, bits per byte: means over the peers of the beginning who were left."""
        curves = [peer.curve for peer in self.at_end if peer.rank < self.match.peers]
        count = min(map(len, curves), default=0)
        rows = [[curve[place] for curve in curves] for place in range(count)]
        return [(fmean(r[0] for r in row) / 60, sum(r[2] for r in row) / 1e6, fmean(r[3] for r in row)) for row in rows]


def read(path: Path) -> list[Result]:
    """All that was played; the last word of a match that was kept twice."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = [_of(json.loads(line)) for line in lines]
    return list({result.match: result for result in found}.values())


def keep(path: Path, result: Result) -> None:
    """One more line."""
    with path.open("a") as out:
        peers = [asdict(peer) | {"curve": [_short(row) for row in peer.curve]} for peer in result.peers]
        rounded = [{key: _short(value) for key, value in peer.items()} for peer in peers]
        out.write(json.dumps({"match": result.match.to_json(), "load": result.load, "peers": rounded}) + "\n")


def best_knob(known: list[Result], contestant: str, seconds: float) -> float | str:
    """The value of the search with the lowest loss; KeyError where there was none."""
    found = [
        one
        for one in known
        if one.match.contestant == contestant and one.match.seconds == seconds and not one.match.churn
    ]
    if not found:
        raise KeyError(f"{contestant}: no search in the file; play it first: --kind search --only {contestant}")
    return min(found, key=lambda one: one.bits).match.knob


def _short(value: Any) -> Any:  # Any: JSON
    if isinstance(value, float):
        return round(value, 4)
    return [_short(each) for each in value] if isinstance(value, list | tuple) else value


def _of(line: dict[str, Any]) -> Result:  # Any: JSON
    peers = [Peer(**each | {"curve": [tuple(row) for row in each["curve"]]}) for each in line["peers"]]
    return Result(Match(**line["match"]), peers, line["load"])
