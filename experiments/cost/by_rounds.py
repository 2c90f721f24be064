"""Forecasts by rounds beside forecasts by messages: the means of some seeds, and how long both take.

    python -m experiments.cost.by_rounds messages.jsonl --peers 4,8,16 --seeds 5

What is in ``messages.jsonl`` already is not simulated again. Twenty rounds of 30 inner steps of a second, a model of 5
million values, presets as they are otherwise; on profiles on which both can be had.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

from decentral.manifest import Manifest, preset_manifest
from decentral.simulate.by_rounds.forecast import is_by_rounds
from decentral.simulate.scenario import PROFILES
from decentral.simulate.simulation import By, forecast

PRESETS = ("sparseloco", "diloco", "streaming", "noloco")
FIGURES = ("seconds_per_round", "contributors", "utilisation", "bytes_per_peer")
Cell = tuple[str, str, int]


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("messages", type=Path)
    parser.add_argument("--peers", default="4,8,16")
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    known = _read(given.messages)
    for cell in _cells([int(count) for count in given.peers.split(",")]):
        for seed in range(given.seeds):
            if seed not in known[cell]:
                known[cell][seed] = _told(cell, seed, "messages")
                _write(given.messages, cell, known[cell][seed])
        print(_row(cell, known[cell]), flush=True)


def _write(path: Path, cell: Cell, told: dict[str, Any]) -> None:
    with path.open("a") as lines:
        lines.write(json.dumps({"preset": cell[0], "profile": cell[1], "peers": cell[2], **told}) + "\n")


def _cells(sizes: list[int]) -> list[Cell]:
    kinds = [(preset, profile) for preset in PRESETS for profile in PROFILES if is_by_rounds(_terms(preset), profile)]
    return [(preset, profile, peers) for preset, profile in kinds for peers in sizes]


def _terms(preset: str) -> Manifest:
    return preset_manifest(preset, run={"rounds": 100, "salt": "x"}, inner={"steps": 30})


def _told(cell: Cell, seed: int, by: By) -> dict[str, Any]:
    preset, profile, peers = cell
    began = time.perf_counter()
    given: dict[str, Any] = {"peers": peers, "profile": profile, "seed": seed, "by": by}
    found = forecast(_terms(preset), **given, rounds=20, step_seconds=1.0, parameters=5_000_000)
    return {name: found[name] for name in FIGURES} | {"seed": seed, "wall": time.perf_counter() - began}


def _read(path: Path) -> defaultdict[Cell, dict[int, dict[str, Any]]]:
    found = defaultdict[Cell, dict[int, dict[str, Any]]](dict)
    for line in path.read_text().splitlines() if path.exists() else ():
        one = json.loads(line)
        found[one["preset"], one["profile"], one["peers"]][one["seed"]] = one
    return found


def _row(cell: Cell, messages: dict[int, dict[str, Any]]) -> str:
    rounds = [_told(cell, seed, "rounds") for seed in messages]
    texts = [f"{cell[0]}, {cell[1]}, {cell[2]}", str(len(messages))]
    for figure in FIGURES:
        both = [fmean(one[figure] for one in each) for each in (messages.values(), rounds)]
        scale = 1e6 if figure == "bytes_per_peer" else 1.0
        apart = f" ({both[1] / both[0] - 1:+.0%})" if both[0] else ""
        texts.append(f"{both[0] / scale:.3g}, {both[1] / scale:.3g}{apart}" if both[0] else "-")
    texts.append(f"{fmean(one['wall'] for one in messages.values()):.1f}, {fmean(one['wall'] for one in rounds):.2f}")
    return f"| {' | '.join(texts)} |"


if __name__ == "__main__":
    main()
