"""Every preset against a peer alone, on the student: the table of docs/optimizers.md.

    python -m tests.lab.preset_table            # measures all again, and writes each row when it is known
    python -m tests.lab.preset_table demo_sgd   # one of them, 13 s of one core; muloco takes 130

Four peers by what `decentral init --preset` writes for a model of that size, and a peer alone, with as many inner steps
of the same optimizer at the same constant rate. Four layers, of which a peer alone is still learning after 3,000 steps:
with one layer it is at its noise by 1,200, and there is nothing to gain but a mean.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

from decentral.manifest import Manifest, preset_manifest
from decentral.manifest.presets import default_scale, suit
from decentral.manifest.terms import Inner
from decentral.optimizers import presets
from decentral.trial.own_model import OwnCourse, TrainsAlone
from tests.lab.student import WIDTH, builder

PAGE = Path(__file__).parents[2] / "docs/optimizers.md"
LAYERS = 4
PEERS = 4
STEPS = 3000  # 100 rounds of 30, which is what init writes
EARLY = 300


def terms_of(preset: str) -> Manifest:
    """As init writes them, for so many inner steps."""
    whole = preset_manifest(preset, run={"salt": "0"})
    rounds = STEPS // whole.inner.steps
    terms = suit(preset, whole, rounds, default_scale(parameters=LAYERS * WIDTH * WIDTH, peers=PEERS))
    return terms.changed(run={"rounds": rounds * whole.outer.fragments})


def together(terms: Manifest, *steps: int, first: int = 0) -> list[float]:
    """The loss after so many inner steps of each peer, ``first`` the first one's number."""
    course = OwnCourse(builder(terms.inner, LAYERS), terms, PEERS, first)
    return [course.go(until) for until in steps]


@cache
def alone(inner: Inner, first: int = 0) -> float:
    """The loss of one peer after as many inner steps."""
    return TrainsAlone(builder(inner, LAYERS), first).go(STEPS // inner.steps * inner.steps)


def row(preset: str) -> str:
    """Its line of the table."""
    terms = terms_of(preset)
    early, late = together(terms, EARLY, STEPS)
    length = f"{terms.inner.steps} x {STEPS // terms.inner.steps}"
    return f"| `{preset}` | {length} | {early:.4f} | {late:.4f} | {alone(terms.inner):.4f} |"


HEAD = "| preset | H x rounds | after 300 steps | together | alone |\n|---|---|---|---|---|\n"
ROW = re.compile(r"^\| `(\w+)` \| \d+ x \d+ \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE)


def written() -> dict[str, tuple[float, float, float]]:
    """Figures of the page: the loss early and late, and alone."""
    found = ROW.findall(PAGE.read_text(encoding="utf-8"))
    return {name: (float(early), float(late), float(single)) for name, early, late, single in found}


def write(preset: str, line: str) -> None:
    """Put it into the page, whose rows are in the order of the losses."""
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.split(HEAD)
    rows = {found[1]: found[0] for found in ROW.finditer(after)} | {preset: line}
    ordered = sorted(rows.values(), key=lambda one: float(one.split("|")[4]))
    PAGE.write_text(before + HEAD + "\n".join(ordered) + "\n\n" + ROW.sub("", after).lstrip("\n"), encoding="utf-8")


def main(names: list[str]) -> None:
    """Measure these again."""
    for name in names:
        line = row(name)
        print(line, flush=True)
        write(name, line)


if __name__ == "__main__":
    main(sys.argv[1:] or list(presets()))
