"""Makes the results of aggregation.json again: ``pip install byzfl==0.0.11`` where torch is, then run this file.

The vectors are those of the file; a case is added by its vectors, its ``f`` and its ``kind``. Covariance-bound-agnostic
filtering makes one power iteration from a random vector: here that vector is the main direction itself, which one more
iteration does not turn. And who counts nothing any more is at the mean, so that the others are measured against those
who are left: the library measures against whoever is furthest, and a lap then takes next to nothing from anybody.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import byzfl  # type: ignore[import-not-found]
import numpy as np

FILE = Path(__file__).parents[1] / "aggregation.json"
Floats = Any  # of numpy, float64
Rule = Callable[[Floats], Floats]


def main_direction(dimension: int) -> Floats:
    """What CAF takes for random: of its caller's own covariance the main direction. Who is gone is no more apart."""
    told = sys._getframe(1).f_locals  # compute_dominant_eigenvector: the only way in
    apart_KN, count_K = told["diffs"], told["c"]
    apart_KN[count_K == 0] = 0.0
    return np.linalg.eigh((apart_KN.T * count_K) @ apart_KN)[1][:, -1]


def rules(f: int) -> dict[str, Rule]:
    """The library's, by our spelling."""
    nnm, arc, groups, median = byzfl.NNM(f), byzfl.ARC(f), byzfl.Bucketing(1), byzfl.GeometricMedian()
    return {
        "mean": byzfl.Average(),
        "median": byzfl.Median(),
        "trimmed_mean": byzfl.TrMean(f),
        "meamed": byzfl.Meamed(f),
        "rfa": median,
        "krum": byzfl.Krum(f + 1),  # sums n - f' - 1 squared distances, where the paper has n - f - 2
        "multi_krum": byzfl.MultiKrum(f + 1),
        **{f"centered_clip tau={tau:g} iterations=5": byzfl.CenteredClipping(L=5, tau=tau) for tau in (1.0, 5.0, 1e9)},
        "mda": byzfl.MDA(f),
        "nnm then=mean": lambda sent_KN: nnm(sent_KN).mean(0),
        "nnm then=rfa": lambda sent_KN: median(nnm(sent_KN)),
        "arc then=mean": lambda sent_KN: arc(sent_KN).mean(0),
        "arc then=rfa": lambda sent_KN: median(arc(sent_KN)),
        "bucketing size=1 then=rfa": lambda sent_KN: median(groups(sent_KN)),
        "caf": byzfl.CAF(f),
    }


def results(case: dict[str, Any]) -> dict[str, list[float]]:
    """What the library gives, by our spelling."""
    return {name: rule(np.array(case["vectors"])).tolist() for name, rule in rules(case["f"]).items()}


if __name__ == "__main__":
    np.random.randn = main_direction
    np.random.seed(0)  # of bucketing, whose groups are of one: the order in which the median adds
    told = json.loads(FILE.read_text(encoding="utf-8"))
    for case in told["cases"]:
        case["results"] = results(case)
    FILE.write_text(json.dumps(told, indent=0) + "\n", encoding="utf-8")
