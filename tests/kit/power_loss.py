"""A recorded history of a run directory, and the promises that a power cut may have broken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from decentral.errors import DecentralError
from decentral.simulate.disk import Operation, RecordingDisk, crash_states
from tests.kit.history import History
from tests.kit.life import Acknowledged, Life, Word, found_in, goes_on

ROUNDS = 9  # five checkpoints, and a commit after the journal was shortened
GO_ON_EVERY = 16  # restarts between two that also write on and restart again


class Recorded:
    """The operations of a life, and what was acknowledged after how many of them."""

    def __init__(self, history: History, folder: Path) -> None:
        self.history = history
        disk = RecordingDisk(folder, keep_log=True)
        self.marks: list[tuple[int, Word, int]] = []
        life = Life(history, folder, lambda word, round_: self.marks.append((len(disk.log), word, round_)), disk)
        life.go_on(ROUNDS)
        self.log = disk.log

    def promised(self, done: int) -> Acknowledged:
        promised = Acknowledged()
        for mark, word, round_ in self.marks:
            if mark <= done:
                promised.hear(word, round_)
        return promised


def broken_promises(recorded: Recorded, log: Sequence[Operation], folder: Path, **bounds: int) -> Iterator[str]:
    """Restarts in every crash state of a log; equal states are entered once."""
    history, disk, found = recorded.history, RecordingDisk(folder), {}
    for state in crash_states(log, **bounds):
        where = f"after operation {state.done} {log[state.done - 1].call if state.done else 'none'}"
        try:
            if state.tree not in found:
                disk.become(state.tree)
                found[state.tree] = found_in(history, folder, disk)
                if len(found) % GO_ON_EVERY == 0 and not goes_on(history, folder, disk):
                    yield f"{where}: what a restart writes is lost"
            for fault in found[state.tree].faults(history, recorded.promised(state.done)):
                yield f"{where}: {fault}"
        except DecentralError as error:
            yield f"{where}: {error}"
