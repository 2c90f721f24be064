"""The file of what was played, and what a match comes to over its peers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.contestants.outcome import UNKNOWN, Peer
from experiments.contestants.terms import Match

RESULTS = Path(__file__).with_name("results.jsonl")


@dataclass(frozen=True, slots=True)
class Result:
    """A match that was played. ``load``: of the machine in its last minute, the match's own included."""

    match: Match
    peers: list[Peer]
    load: float

    @property
    def survivors(self) -> list[Peer]:
        """Those of the beginning whom nobody killed; whether they went on is another question."""
        return [peer for peer in self.peers if peer.rank < self.match.peers and peer.ended != "killed"]

    @property
    def goers(self) -> list[Peer]:
        """Survivors who trained to the end, or were in the middle of a round that is no longer than others."""
        return [peer for peer in self.survivors if peer.trains_at(self.match.seconds)]

    @property
    def late(self) -> Peer | None:
        """Who came in the middle."""
        return next((peer for peer in self.peers if peer.rank >= self.match.peers), None)

    @property
    def bits(self) -> float:
        """Held-out bits per byte of the last weights of each survivor, the mean over them."""
        return fmean([peer.bits for peer in self.survivors] or [UNKNOWN])

    @property
    def worst(self) -> float:
        """The same of the worst survivor."""
        return max([peer.bits for peer in self.survivors] or [UNKNOWN])

    @property
    def computing(self) -> float:
        """Share of the match that survivors spent on steps."""
        return fmean([peer.computing for peer in self.survivors] or [0.0]) / self.match.seconds

    @property
    def pause(self) -> float:
        """Seconds: the longest time that a survivor was without a step."""
        return max([peer.pause for peer in self.survivors] or [0.0])

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
        """Minutes, megabytes that all have sent, bits per byte: means over survivors."""
        curves = [peer.curve for peer in self.survivors]
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
    found = [one for one in known if one.match.contestant == contestant and _is_search(one.match, seconds)]
    if not found:
        raise KeyError(f"{contestant}: no search in the file; play it first: --kind search --only {contestant}")
    return min(found, key=lambda one: one.bits).match.knob


def _is_search(match: Match, seconds: float) -> bool:
    return match.seconds == seconds and not match.churn


def _short(value: Any) -> Any:  # Any: JSON
    if isinstance(value, float):
        return round(value, 4)
    return [_short(each) for each in value] if isinstance(value, list | tuple) else value


def _of(line: dict[str, Any]) -> Result:  # Any: JSON
    peers = [Peer(**each | {"curve": [tuple(row) for row in each["curve"]]}) for each in line["peers"]]
    return Result(Match(**line["match"]), peers, line["load"])
