"""The table of what experiments/attacks/table.py measured: Markdown, CSV and a figure beside the records.

    python experiments/attacks/report.py

From records alone, in seconds; a table of fewer seeds than were begun says so.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from math import isnan
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.attacks.grid import Grid, Tax
from experiments.attacks.records import CELLS, NONE, finished

BOUND = 0.5  # percent: what the rule of the presets may cost
SHORT = {
    "optimised_alie": "ALIE, optimised",
    "optimised_ipm": "IPM, optimised",
    "sign_flip": "sign flip",
    "scale(factor=100)": "scale 100",
    "scale(factor=10)": "scale 10",
    "label_flip": "label flip",
    "alie": "ALIE",
    "ipm": "IPM",
    "withheld(share=1)": "withheld",
}


def main() -> None:
    """Write table.md, table.csv and table.png, the last of the setting that the file names first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=Path, default=CELLS)
    path = parser.parse_args().cells
    grids = Grid.all_of(finished(path))
    if not (grids and grids[0].seeds):
        sys.exit(f"{path}: no seed in which every rule met every attack; go on with experiments/attacks/table.py")
    told = "\n".join(["# Attacks on aggregation rules", "", *map(markdown, grids)])
    path.with_name("table.md").write_text(told, encoding="utf-8")
    path.with_name("table.csv").write_text(as_csv(grids), encoding="utf-8")
    from experiments.attacks.figure import draw

    draw(grids[0], path.with_name("table.png"))
    print(told)


def markdown(grid: Grid) -> str:
    """A setting: its attacks, where a seed is whole, and its taxes."""
    parts = [f"## Shares from Dirichlet({grid.alpha:g}), {grid.rounds} rounds\n"]
    return "\n".join([*parts, *([attacked(grid)] if grid.seeds else []), taxes(grid)])


def attacked(grid: Grid) -> str:
    """A row for each rule, the best in its worst case first."""
    heads = ["rule", "worst case", "lowest seed", "none", *(label(attack) for attack in grid.attacks)]
    lines = [_row(heads), _row(["---", *["---:"] * (len(heads) - 1)])]
    lines += [_row(_cells_of(grid, rule)) for rule in grid.ranked()]
    count = "one seed" if len(grid.seeds) == 1 else f"the mean of {len(grid.seeds)} seeds"
    head = f"Accuracy in percent, {count}; bold: the worst attack of the rule."
    return "\n".join([head, "", *lines, ""])


def taxes(grid: Grid) -> str:
    """What each rule costs without an attack."""
    lines = [_row(["rule", "accuracy lost, %", f"at most {BOUND} %", "loss above the mean's, %", "seeds"])]
    lines.append(_row(["---", "---:", "---", "---:", "---:"]))
    for rule in sorted(grid.rules, key=lambda one: grid.tax(one).mean):
        tax = grid.tax(rule)
        verdict = {True: "yes", False: "no", None: "open"}[tax.within(BOUND)]
        lines.append(_row([f"`{rule}`", interval(tax), verdict, interval(grid.loss_tax(rule)), str(tax.seeds)]))
    return "\n".join(["Tax without an attack, paired with `mean`, 90 % t interval.", "", *lines, ""])


def as_csv(grids: list[Grid]) -> str:
    """One line for each rule and attack of each setting that has whole seeds."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["alpha", "rounds", "rule", "attack", "seeds", "accuracy", "lowest", "highest"])
    for grid, rule in [(one, rule) for one in grids for rule in one.rules]:
        for attack in (NONE, *grid.attacks):
            found = grid.accuracies(rule, attack)
            if found:
                numbers = [f"{f(found):.4f}" for f in (fmean, min, max)]
                writer.writerow([f"{grid.alpha:g}", grid.rounds, rule, attack, len(found), *numbers])
    return text.getvalue()


def interval(tax: Tax) -> str:
    """Mean and half of the interval, to a hundredth."""
    if isnan(tax.mean):
        return "none"
    return f"{tax.mean:.2f}" + ("" if isnan(tax.half) else f" ± {tax.half:.2f}")


def label(attack: str) -> str:
    """For the head of a column."""
    return SHORT.get(attack, attack)


def _cells_of(grid: Grid, rule: str) -> list[str]:
    worst, honest = grid.worst(rule), grid.accuracies(rule, NONE)
    told = [f"`{rule}`", f"{100 * worst.accuracy:.1f}", f"{100 * worst.lowest:.1f}"]
    told.append(f"{100 * fmean(honest):.1f}" if honest else "")
    for attack in grid.attacks:
        number = f"{100 * fmean(grid.accuracies(rule, attack)):.1f}"
        told.append(f"**{number}**" if attack == worst.attack else number)
    return told


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
