"""From a study to all its cells: what is there is kept, what is wanted is run, until the plan wants nothing more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from decentral.lab.runs.cell import Cell
from decentral.lab.runs.running import Outcome
from decentral.lab.study.plan import Plan
from decentral.lab.study.store import Store
from decentral.lab.study.workers import Workers

__all__ = ["Progress", "run_study"]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a study is, after a cell."""

    done: int
    of: int
    told: str  # of the last cell

    @classmethod
    def after(cls, done: int, size: int, cell: Cell, outcome: Outcome) -> Progress:
        """``size``: as many as were expected beforehand."""
        manifest = cell.manifest
        what = manifest.outer.method if cell.kind == "swarm" else f"{cell.kind} {manifest.inner.named}"
        end = f"{outcome.loss:.4f}" if outcome.loss is not None else f"{outcome.status} {outcome.reason}".strip()
        told = f"{what}, {manifest.inner.learning_rate:g}, seed {manifest.run.seed}: {end} in {outcome.seconds:.1f} s"
        return cls(done, max(size, done), told)


def run_study(
    plan: Plan, store: Store, workers: Workers, on_progress: Callable[[Progress], None] = lambda progress: None
) -> dict[str, Outcome]:
    """Run what is missing; what all the study's cells came to, and others that the folder holds. DiskError."""
    known = store.known()
    size = plan.size()
    while True:
        running = workers.running
        wanted = [cell for cell in plan.wanted(known) if cell.id not in running]
        for cell in wanted[: workers.idle]:
            workers.give(cell)
        if not workers.running:
            return known
        for cell, outcome in workers.take():
            store.keep(cell, outcome)
            known[cell.id] = outcome
            on_progress(Progress.after(plan.done(known), size, cell, outcome))
