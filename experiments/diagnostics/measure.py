"""What the figures of `decentral.observe.contributions` are in runs that are well, and in runs that are not.

A laboratory's swarm in one process: the demo's inner optimizer and batch, a language model of 0.1 to 0.2 million
parameters, the preset's method, compressor and feedback. One line of JSON for each run: of each figure the smallest,
the median and the largest over the rounds after the first ten, and the warnings, if any.

    OMP_NUM_THREADS=1 nice -n 10 python experiments/diagnostics/measure.py --rounds 60 diloco sparseloco noloco
    ... --fault rate          # the last peer's inner learning rate is ten times the others'
    ... --fault uneven        # each peer reads other folders of the text
    ... --fault twins         # all peers read the same text in the same order
    ... --fault outer         # the outer learning rate is 4: of DiLoCo and SparseLoCo, where 0.7 and 1 are usual
    ... --fault thin          # one value of 4,096 is sent, and the debt never decays
    ... --fault kept          # no fault: the debt of sparseloco never decays
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from torch import Tensor

from decentral.lab.lockstep import lockstep_of
from decentral.lab.work import Language
from decentral.manifest import Manifest, preset_manifest
from decentral.observe.contributions import Coverage, Distances, compare, compare_two, ratio
from decentral.observe.diagnostics import DEBT_RATIO, NEVER_SENT, BandWatch, Figures
from decentral.replica.contribution import Contribution
from decentral.replica.measures import Measure
from decentral.tasks.corpus import load_corpus
from decentral.tasks.sizing import demo_tables
from decentral.trial import meeting
from decentral.trial.course import Course
from decentral.trial.meeting import Met
from decentral.trial.replicas import TrialWorld, trial_peers

FIRST = 10  # rounds that are left out of the quantiles
FAULTS = ("none", "rate", "uneven", "twins", "outer", "thin", "kept")


class Twins(Language):
    """Everybody reads what rank 0 reads."""

    def tokens(self, rank: int, step: int) -> Tensor:
        return super().tokens(0, step)


class Looked(Course):
    """A course that is looked at as `decentral.observe.contributions` does."""

    def begin(self) -> None:
        """Look from now on."""
        self.figures: list[Figures] = []
        self.coverage = Coverage(self.peers[0].replica.samples)

    def _met(self, named: dict[int, Contribution]) -> Met:
        met = super()._met(named)
        first, replica = next(iter(named.values())), self.peers[0].replica
        sent = [self._sent(rank, made) for rank, made in named.items()]
        values = {} if replica.method.summary.divides else compare([Measure.of([one], one.numel()) for one in sent])
        if met.step.came_S is not None:
            self.coverage.add(met.step.fragment, met.step.came_S)
        debt_N = self.peers[min(named)].replica.feedback[first.fragment].get("debt")
        sample = self.coverage.samples[first.fragment]
        owes = None if debt_N is None else ratio(sample.of(debt_N), first.change_at(sample))
        values |= {} if owes is None else {DEBT_RATIO: owes}
        values |= {} if self.coverage.never_sent is None else {NEVER_SENT: self.coverage.never_sent}
        self.figures.append(Figures(met.head.outer_step, len(named), self.coverage.rounds, False, values))
        return met

    def _sent(self, rank: int, made: Contribution) -> Tensor:
        """As others decode it; of a reduce as it was before compression."""
        replica = self.peers[rank].replica
        return (
            made.gradient_N
            if made.encoded is None
            else replica.codec.decode(
                made.encoded.body, replica.shapes(made.fragment) * (1 + len(made.states)), 1 + len(made.states)
            )[: made.gradient_N.numel()]
        )


def look_at_pairs(course: Looked) -> None:
    """Of rank 0's pairs: what `step_together` is given and gives."""
    distances, step_together = Distances(), meeting.step_together

    def looked(replica: Any, step: int, mine: Contribution, mine_CN: Tensor, theirs_CN: Tensor) -> Any:
        taken = step_together(replica, step, mine, mine_CN, theirs_CN)
        if replica is course.peers[0].replica:
            due = replica.due(step)
            values = compare_two(due, mine_CN, theirs_CN, course.coverage.samples[mine.fragment])
            values |= distances.add(taken.disagreement)
            course.figures.append(Figures(step + 1, 2, 0, False, values))
        return taken

    meeting.step_together = looked


def terms(name: str, args: argparse.Namespace) -> Manifest:
    tables = demo_tables(name)
    fragments = preset_manifest(name).outer.fragments
    tables["model"] |= {"hidden": 64, "layers": max(2, fragments), "context": 64}
    manifest = preset_manifest(name, run={"salt": "diagnostics", "rounds": args.rounds, "seed": args.seed}, **tables)
    if args.fault == "outer":
        return manifest.changed(outer={"learning_rate": 4.0})
    if args.fault == "kept":
        return manifest.changed(compressor={"feedback": "ef(beta=1.0)"})
    if args.fault == "thin":
        return manifest.changed(compressor={"chain": "topk(k=1, chunk=4096)", "feedback": "ef(beta=1.0)"})
    return manifest


def run(name: str, args: argparse.Namespace) -> dict[str, object]:
    began, manifest = time.monotonic(), terms(name, args)
    kind = Twins if args.fault == "twins" else Language
    work = kind(manifest, load_corpus(), args.peers, uneven=args.fault == "uneven", windows=32)
    modules = [work.model() for _ in range(args.peers)]
    peers = trial_peers(manifest, modules)
    if args.fault == "rate":
        peers[-1]._schedulers.clear()  # no warm-up either
        for group in (group for optimizer in peers[-1].optimizers for group in optimizer.param_groups):
            group["lr"] = 10 * manifest.inner.learning_rate
    trained = work.trained(modules)
    course = Looked(work, peers, trained, TrialWorld(args.peers), lockstep_of(peers, trained))
    course.begin()
    look_at_pairs(course)
    before = work.held_out(modules[0])
    for _ in course.go():
        pass
    watch = BandWatch()
    told = [crossing for figures in course.figures for crossing in watch.see(figures)]
    found: dict[str, list[float]] = {}
    for figures in course.figures[FIRST:]:
        for figure, value in figures.values.items():
            found.setdefault(figure, []).append(value)
    return {
        "preset": name, "fault": args.fault, "peers": args.peers, "rounds": args.rounds, "seed": args.seed,
        "held_out": [round(before, 3), round(work.held_out(modules[0]), 3)], "seconds": round(time.monotonic() - began),
        "figures": {figure: [float(f"{q:.3g}") for q in np.quantile(v, [0, 0.5, 1])] for figure, v in found.items()},
        "last": {figure: float(f"{v[-1]:.3g}") for figure, v in found.items()},
        "told": [[one.outer_step, one.figure, float(f"{one.value:.3g}"), one.is_out] for one in told],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("presets", nargs="+")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fault", choices=FAULTS, default="none")
    args = parser.parse_args()
    for name in args.presets:
        print(json.dumps(run(name, args)), flush=True)


if __name__ == "__main__":
    main()
