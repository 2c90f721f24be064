"""The README's figure: what a round loses against what it sends, for every method that was measured.

OMP_NUM_THREADS=1 decentral bench compressors --data pseudo_gradients.safetensors --json > rows.json
python experiments/compressors/figure.py rows.json docs/compressors.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

OURS, OTHERS = "#0b6e99", "#b5541c"
PLACES = {  # of labels, points from the dot, where dots are close together
    "natural": (2, 6),
    "e3m0": (6, -2),
    "int4": (-22, -8),
    "signmag2": (-10, -11),
    "nf4": (6, -5),
    "int8": (-8, -11),
    "codebook8": (6, 1),
    "hivemind ScaledFloat16": (-92, -12),
    "hivemind Float16": (-62, 16),
    "fp16": (-24, 0),
    "topk >> signmag2": (-22, -12),
    "topk >> int8": (-18, 7),
    "topk >> bf16": (0, -12),
    "published SparseLoCo": (-10, 18),
    "topk": (6, 2),
    "threshold": (-14, -12),
}
SPARSE = 0.9  # bits per value, below which not every value can have been sent


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("rows", type=Path)
    arguments.add_argument("out", type=Path)
    given = arguments.parse_args()
    rows: list[dict[str, Any]] = json.loads(given.rows.read_text(encoding="utf-8"))
    rows = [row for row in rows if row["data"] == rows[-1]["data"] and row["relative_error"]]
    figure, (dense, sparse) = plt.subplots(1, 2, figsize=(11, 4.4), constrained_layout=True)
    draw(dense, [row for row in rows if row["bits_per_value"] >= SPARSE])
    dense.set(yscale="log", title="every value sent", ylabel="relative error of one round")
    draw(sparse, [row for row in rows if row["bits_per_value"] < SPARSE])
    sparse.set(title="few values, the rest owed", xlim=(0, 0.62))
    figure.savefig(given.out, dpi=110)


def draw(panel: Axes, rows: list[dict[str, Any]]) -> None:
    """Bits per value against norm lost / norm given."""
    for row in rows:
        theirs = row["method"].startswith(("hivemind", "zstd", "published"))
        panel.plot(row["bits_per_value"], row["relative_error"], "o", ms=5, color=OTHERS if theirs else OURS)
        panel.annotate(
            short(row["method"]),
            (row["bits_per_value"], row["relative_error"]),
            xytext=PLACES.get(short(row["method"]), (6, -3)),
            textcoords="offset points",
            fontsize=7,
            color=OTHERS if theirs else "#333333",
        )
    panel.set(xlabel="bits per value on the wire, everything counted")
    panel.grid(lw=0.3)
    panel.spines[["top", "right"]].set_visible(False)


def short(method: str) -> str:
    """A label that fits."""
    head, _, quantiser = method.removesuffix("Compression").removesuffix(", plain torch").partition(" >> ")
    return f"{head.split('(')[0]} >> {quantiser.split('(')[0]}" if quantiser else head.split("(")[0]


if __name__ == "__main__":
    main()
