"""What a match is: who plays, on which lines, for how long, and who is killed and who comes late. Plain values.

A match is five numbers and a name; everything else is a constant here, the same for all contestants.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

PEERS = 4
PACE = 0.5  # s of an inner step, waiting included: a real step takes a tenth of it, and four share two cores
MODEL = {"hidden": 192, "layers": 2, "heads": 3, "context": 128}  # 934,848 parameters, 3.7 MB in float32
BATCH_SIZE = 4  # windows of 128 bytes for each step and peer
ADAMW = {"lr": 1e-3, "weight_decay": 0.1}  # what the demo's search found for models of this kind
CLIP = 1.0
DELAY = 0.0125  # s, one way, from a peer to the core: 25 ms from peer to peer
KNOBS: dict[str, tuple[float | str, ...]] = {  # of each the one that its documentation says to choose
    "sparseloco": (10, 20, 40),  # inner steps a round
    "diloco": (10, 20, 40),
    "hivemind": (10, 20, 40),  # steps of each peer in target_batch_size
    "torchft": (10, 20, 40),  # sync_every
    "ddp": ("none", "fp16", "powersgd"),  # its communication hook
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """One match. ``mbit``: each way, of every peer's line; 0: all on the machine's own loopback, for tests."""

    contestant: str
    knob: float | str
    mbit: float = 20.0
    seconds: float = 60.0
    churn: bool = False  # one peer killed at a third, another one joining at half
    seed: int = 0
    peers: int = PEERS
    pace: float = PACE

    @property
    def name(self) -> str:
        """Of its folder, and in records."""
        kind = "-churn" if self.churn else ""
        return f"{self.contestant}-{self.knob}-{self.mbit:g}mbit-{self.seconds:g}s{kind}-seed{self.seed}"

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        """As the first line of a record has it."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Event:
    """What happens to a peer at a time, in seconds of the match."""

    at: float
    what: str  # kill, join
    rank: int


def events(match: Match) -> list[Event]:
    """The last of the first peers goes, for the first one is everybody's way in; who joins has data of its own."""
    if not match.churn:
        return []
    return [Event(match.seconds / 3, "kill", match.peers - 1), Event(match.seconds / 2, "join", match.peers)]


def data_key(rank: int) -> bytes:
    """By which the rows of a peer are drawn: the same for all contestants, another for every rank."""
    return rank.to_bytes(4, "little")
