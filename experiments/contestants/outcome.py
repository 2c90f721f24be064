"""What came out of a match, from the files that its workers left: curves, time computing, bytes, pauses, survivors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.contestants.terms import BATCH_SIZE, MODEL, Match

Line = dict[str, Any]  # Any: JSON
UNKNOWN = 8.0  # bits per byte: knowing nothing
STILL = 15.0  # s without a step after which a peer no longer trains: twice what a round takes here
WINDOWS = 64  # of 128 bytes, evenly spread over the held-out slice


@dataclass(frozen=True, slots=True)
class Peer:
    """One peer's part. ``curve``: seconds of the match, steps, bytes sent so far, held-out bits per byte."""

    rank: int
    ended: str  # done, killed, silent, or what it failed with
    steps: int
    first: float | None  # s of the match at which the first step was over; None: there was none
    last: float
    pause: float  # s, the longest step after the others' first, or what was left without one
    computing: float  # s: a step's pace each
    overrun: float  # s that real computing took beyond the pace
    sent: int  # bytes
    curve: list[tuple[float, int, int, float]]
    asked: float | None = None  # s of the match at which it began to look for the others, its imports behind it

    @property
    def bits(self) -> float:
        """Held-out bits per byte of its last weights."""
        return self.curve[-1][3] if self.curve else UNKNOWN

    def trains_at(self, end: float) -> bool:
        """Whether its process lived, and had made a step not long before."""
        return self.ended in ("done", "silent") and end - self.last < STILL

    @property
    def tokens(self) -> int:
        """Trained on."""
        return self.steps * BATCH_SIZE * MODEL["context"]


def read_lines(path: Path) -> Iterator[Line]:
    """Of a file whose last line a kill may have torn."""
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return


def peer_of(
    match: Match, rank: int, lines: list[Line], bits: dict[str, float], ended: str, asked: float | None = None
) -> Peer:
    """From its lines; ``bits``: held-out loss of each file of weights that was looked at."""
    steps = [line for line in lines if "loss" in line]
    pictures = [line for line in lines if line.get("weights") in bits]
    tail = match.seconds - steps[-1]["at"] if steps and ended != "killed" else 0.0
    return Peer(
        rank=rank,
        ended=ended,
        steps=len(steps),
        first=steps[0]["at"] if steps else None,
        last=steps[-1]["at"] if steps else 0.0,
        pause=max([tail, *(line["seconds"] for line in steps)]),
        computing=len(steps) * match.pace,
        overrun=sum(max(0.0, line["computed"] - match.pace) for line in steps),
        sent=max([0, *(line["sent"] for line in lines)]),
        curve=[(line["at"], line["step"], line["sent"], bits[line["weights"]]) for line in pictures],
        asked=asked,
    )


def ended_of(match: Match, folder: Path, rank: int) -> str:
    """How a peer's part ended, by what it left."""
    if (folder / f"done-{rank}").exists():
        return "done"
    if (folder / f"failed-{rank}").exists():
        return (folder / f"failed-{rank}").read_text()
    return "killed" if match.churn and rank == match.peers - 1 else "silent"


def outcome(match: Match, folder: Path, *, curves: bool = True) -> list[Peer]:
    """Of all peers that were started. Without ``curves`` only the last weights are looked at."""
    found = []
    for path in sorted(folder.glob("log-*"), key=lambda each: int(each.name.removeprefix("log-"))):
        rank = int(path.name.removeprefix("log-"))
        lines = list(read_lines(folder / f"steps-{rank}.jsonl"))
        names = [line["weights"] for line in lines if "weights" in line]
        bits = held_out_bits(match, [folder / name for name in (names if curves else names[-1:])])
        found.append(peer_of(match, rank, lines, bits, ended_of(match, folder, rank), asked_of(folder, rank)))
    return found


def asked_of(folder: Path, rank: int) -> float | None:
    """Seconds of the match at which a peer, ready to train, looked for the others; None if it never came so far."""
    asked, go = folder / f"asks-{rank}", folder / "go"
    return float(asked.read_text()) - float(go.read_text()) if asked.exists() and go.exists() else None


def held_out_bits(match: Match, paths: list[Path]) -> dict[str, float]:
    """Bits per byte of each file of weights, on the same slice for all."""
    import torch
    from safetensors.torch import load_file

    from decentral.tasks.corpus import load_corpus
    from decentral.tasks.evaluate import bits_per_byte
    from experiments.contestants.loop import fresh_model

    held_out, model, found = load_corpus().held_out, fresh_model(match.seed), {}
    for path in paths:
        with torch.no_grad():
            for name, value in load_file(path).items():
                model.get_parameter(name).copy_(value)
        found[path.name] = bits_per_byte(model, held_out, context=MODEL["context"], num_windows=WINDOWS)
    return found
