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


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("rows", type=Path)
    arguments.add_argument("out", type=Path)
    given = arguments.parse_args()
    rows: list[dict[str, Any]] = json.loads(given.rows.read_text(encoding="utf-8"))
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.6), constrained_layout=True)
    for panel, data in zip(panels, dict.fromkeys(row["data"] for row in rows), strict=False):
        draw(panel, [row for row in rows if row["data"] == data and row["relative_error"]])
        panel.set_title("Gaussian values" if data == "gaussian" else "pseudo-gradients of a small Llama, debt included")
    panels[0].set_ylabel("relative error of one round (norm lost / norm given)")
    figure.savefig(given.out, dpi=110)


def draw(panel: Axes, rows: list[dict[str, Any]]) -> None:
    """Bits per value against relative error; sparse methods lose most of a round's norm and send it later."""
    for row in rows:
        theirs = row["method"].startswith(("hivemind", "zstd", "published"))
        panel.plot(row["bits_per_value"], row["relative_error"], "o", ms=5, color=OTHERS if theirs else OURS)
        panel.annotate(
            short(row["method"]),
            (row["bits_per_value"], row["relative_error"]),
            xytext=(4, 3),
            textcoords="offset points",
            fontsize=6.5,
            color="#333333",
        )
    panel.set(xscale="log", yscale="log", xlabel="bits per value on the wire, everything counted")
    panel.grid(True, which="major", lw=0.3)
    panel.spines[["top", "right"]].set_visible(False)


def short(method: str) -> str:
    """A label that fits."""
    head, _, quantiser = method.partition(" >> ")
    return f"{head.split('(')[0]} >> {quantiser.split('(')[0]}" if quantiser else method.split("(")[0]


if __name__ == "__main__":
    main()
