"""Real SIGKILLs of a process that does nothing but write: python -m tests.faults.powerloss --kills 10000

One warm process, without threads of its own, forks a child per kill: no child pays for importing torch. The child
resumes in the folder that the last one was killed in and acknowledges through a pipe what each call made durable. Nine
of ten are killed within the time that a checkpoint takes from its beginning, the others a moment after any of their
first words, the restart included. Then the folder is asked for all that was ever acknowledged in it.

A killed process leaves its writes in the page cache, so this finds torn files and wrong orders, not missing fsyncs;
those are found by enumeration: --states restarts in every state a power cut may leave, with wide bounds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

from decentral.errors import DecentralError
from decentral.simulate.disk import crash_states
from decentral.state.checkpoint import read_checkpoint
from decentral.state.durable import DISK, TEMPORARY
from decentral.state.tensor_file import DamagedFile
from tests.kit.history import History, make_history
from tests.kit.life import Acknowledged, Life, found_in
from tests.kit.power_loss import Recorded, broken_promises

ROUNDS = 60  # of one folder; then the next begins
WIDTH = 512  # 2048 parameters: checkpoints of 16 KiB, frames of 8 KiB
WORDS = 6  # kills fall into the restart and the first rounds after it
BEGINS = "begins"  # said before a checkpoint is written


@dataclass(slots=True)
class Report:
    """What came of it: ``in_checkpoint`` counts kills between its beginning and its end, ``half_written`` those of any
    moment that left something temporary.
    """

    kills: int = 0
    in_checkpoint: int = 0
    half_written: int = 0
    commits: int = 0
    checkpoints: int = 0
    torn: int = 0
    lost: int = 0
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)


def main(arguments: list[str] | None = None) -> int:
    """Kill, look, report one line of JSON; 1 when anything was torn or lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--states", action="store_true", help="every crash state instead of kills")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="decentral-powerloss-") as folder:
        if options.states:
            return every_state(Path(folder))
        report = kill_often(Path(folder), options.kills, random.Random(options.seed))
    print(json.dumps(asdict(report)))
    return 1 if report.faults else 0


def every_state(folder: Path) -> int:
    """All states after each operation, to a bound of 512 at one point."""
    (folder / "life").mkdir()
    (folder / "left").mkdir()
    recorded = Recorded(make_history(10), folder / "life")
    bounds = {"cuts": 24, "limit": 512}
    num_states = sum(1 for _ in crash_states(recorded.log, **bounds))
    faults = list(broken_promises(recorded, recorded.log, folder / "left", **bounds))
    print(json.dumps({"operations": len(recorded.log), "states": num_states, "faults": faults}))
    return 1 if faults else 0


def kill_often(folder: Path, kills: int, rng: random.Random) -> Report:
    """As many kills as asked for, in one folder after the other."""
    history, report, began = make_history(ROUNDS + 1, WIDTH), Report(), time.monotonic()
    life, promised, moment = folder / "0", Acknowledged(), time_of_a_checkpoint(history, folder / "trial")
    while report.kills < kills and len(report.faults) < 10:
        if promised.commit >= ROUNDS:
            DISK.remove(life)
            life, promised = folder / str(report.kills), Acknowledged()
        before, temporary = promised.commit, halves(life)
        words = kill_once(history, life, promised, rng, moment)
        report.kills += 1
        report.commits += promised.commit - before
        report.checkpoints += words.count("checkpoint")
        report.in_checkpoint += words[-1:] == [BEGINS]
        report.half_written += bool(halves(life) - temporary)
        look(history, life, promised, report)
        report.seconds = round(time.monotonic() - began, 1)
        if report.kills % 250 == 0:
            print(json.dumps(asdict(report)), file=sys.stderr)
    return report


def time_of_a_checkpoint(history: History, folder: Path) -> float:
    """Seconds, the median of nine, on this disk and beside what else runs."""
    life, seconds = Life(history, folder, lambda word, round_: None), []
    for _ in range(9):
        began = time.monotonic()
        life.save()
        seconds.append(time.monotonic() - began)
    life.close()
    return sorted(seconds)[4]


def kill_once(history: History, folder: Path, promised: Acknowledged, rng: random.Random, moment: float) -> list[str]:
    """Let a child say some words and live for up to a moment more; ``promised`` hears all. Returns the words."""
    hear, say = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(hear)
        live_on(history, folder, say)
    os.close(say)
    with os.fdopen(hear) as pipe:
        lines = until_checkpoint(pipe) if rng.random() < 0.9 else list(itertools.islice(pipe, rng.randrange(WORDS)))
        select.select([], [], [], rng.uniform(0, moment))
        os.kill(child, signal.SIGKILL)
        lines += pipe
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL), "the child failed by itself; see above"
    words = [line.split() for line in lines if line.endswith("\n")]
    for word, round_ in words:
        if word != BEGINS:
            promised.hear(word, int(round_))  # type: ignore[arg-type]
    return [word for word, _ in words]


def until_checkpoint(pipe: Iterable[str]) -> list[str]:
    """Lines up to the beginning of the first checkpoint."""
    lines = []
    for line in pipe:
        lines.append(line)
        if line.startswith(BEGINS):
            break
    return lines


class Announced(Life):
    """A life that says when it begins to write a checkpoint."""

    def save(self) -> None:
        """Say so, then write it."""
        say = cast(Callable[[str, int], None], self.tell)
        say(BEGINS, self.head.round)
        super().save()


def live_on(history: History, folder: Path, say: int) -> None:
    """The child. Never returns: nothing of the parent's may be cleaned up twice."""

    def tell(word: str, round_: int) -> None:
        os.write(say, f"{word} {round_}\n".encode())

    try:
        Announced(history, folder, tell, checkpoint_every=1).go_on(ROUNDS)
        os._exit(0)
    finally:
        traceback.print_exc()
        os._exit(1)


def halves(folder: Path) -> set[tuple[str, int]]:
    """What is half-written: the folder it is in, and when it changed: that tells it from an earlier one."""
    return {(path.parent.name, path.stat().st_mtime_ns) for path in folder.rglob(f"{TEMPORARY}*")}


def look(history: History, folder: Path, promised: Acknowledged, report: Report) -> None:
    """Count what is torn or lost, as a restart finds it."""
    for checkpoint in folder.glob("checkpoints/[0-9]*"):
        try:
            read_checkpoint(checkpoint)
        except DamagedFile as damage:
            report.torn += 1
            report.faults.append(f"kill {report.kills}: {checkpoint.name}: {damage}")
    try:
        faults = found_in(history, folder).faults(history, promised)
    except DecentralError as error:
        faults = [str(error)]
    report.lost += len(faults)
    report.faults += [f"kill {report.kills}: {fault}" for fault in faults]


if __name__ == "__main__":
    sys.exit(main())
