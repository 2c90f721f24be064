"""Makes attacks.json again: ``pip install byzfl==0.0.11`` where torch is, then run this file.

Of the optimised attacks the file has what each search gives by itself: one side of one attack, against one rule.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import byzfl  # type: ignore[import-not-found]
import numpy as np

FILE = Path(__file__).parents[1] / "attacks.json"
F = 3
CASES = {"alike": (7, 5, 1.0), "apart": (7, 6, 4.0), "few": (4, 3, 1.0)}  # honest peers, values, spread
RULES = {"mean": byzfl.Average(), "trimmed_mean": byzfl.TrMean(F), "mda": byzfl.MDA(F), "median": byzfl.Median()}


def results(honest_KN: Any) -> dict[str, list[float]]:
    """What the library sends, by our spelling; its ALIE adds what ours takes off."""
    found = {
        "sign_flip": byzfl.SignFlipping()(honest_KN),
        "ipm": byzfl.InnerProductManipulation(2.0)(honest_KN),
        "ipm(tau=0.5)": byzfl.InnerProductManipulation(0.5)(honest_KN),
        "alie": byzfl.ALittleIsEnough(-1.5)(honest_KN),
        "alie(z=-1.5)": byzfl.ALittleIsEnough(1.5)(honest_KN),
        "mimic": byzfl.Mimic(0)(honest_KN),
        "mimic(victim=2)": byzfl.Mimic(2)(honest_KN),
    }
    for name, rule in RULES.items():
        for side in (1, -1):
            searched = byzfl.Optimal_ALittleIsEnough(rule, [], F, delta=-10.0 * side)
            found[f"alie {side} {name}"] = searched(honest_KN)
        found[f"ipm 1 {name}"] = byzfl.Optimal_InnerProductManipulation(rule, [], F)(honest_KN)
    return {name: sent_N.tolist() for name, sent_N in found.items()}


if __name__ == "__main__":
    cases = []
    for seed, (kind, (count, numel, spread)) in enumerate(CASES.items()):
        random = np.random.default_rng(seed)
        vectors = np.round(random.normal(size=numel) * 2 + random.normal(size=(count, numel)) * spread, 6)
        cases.append({"kind": kind, "f": F, "vectors": vectors.tolist(), "results": results(vectors)})
    source = "byzfl 0.0.11 (https://github.com/LPD-EPFL/byzfl, arXiv:2505.24802), numpy float64"
    FILE.write_text(json.dumps({"source": source, "cases": cases}, indent=0) + "\n", encoding="utf-8")
