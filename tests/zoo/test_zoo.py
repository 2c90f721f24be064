"""Each loop of the zoo runs unchanged with two peers that agree, or is refused by name."""

from __future__ import annotations

import logging
import statistics
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decentral.errors import ConfigError
from tests.kit.tables import long_but
from tests.zoo import (
    buffers,
    clocks,
    foreign,
    moments,
    ordinary,
    owners,
    resized,
    small,
    switches,
    untrained,
)
from tests.zoo.harness import LOOPS, ROUNDS, Outcome, Script, trained_together

# What each module puts into the table.
KINDS = {one.KIND for one in (buffers, clocks, foreign, moments, ordinary, owners, resized, small, switches, untrained)}


@pytest.mark.parametrize("name", long_but([name for name, row in LOOPS.items() if not row.long], list(LOOPS)))
def test_a_loop_as_people_write_it_runs_or_is_refused_by_name(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = LOOPS[name]
    found = trained_together(row, tmp_path)
    if row.refused:
        check_refused(found, row.refused)
        return
    if row.warned:
        check_warned(found, caplog.records, row.warned)
        return
    check_runs(found)
    if row.learns:
        for script in found.scripts:
            check_learns(script.losses)
    if row.kind == owners.KIND:
        for script in found.scripts:
            assert max(script.strides) < 3 * statistics.median(script.strides), "a step undid a commit"


def test_two_loops_or_more_are_of_each_kind_and_at_least_24_run() -> None:
    assert len(LOOPS) >= 30
    running = [name for name, row in LOOPS.items() if not (row.refused or row.warned)]
    assert len(running) >= 24
    count = Counter(row.kind for row in LOOPS.values())
    assert set(count) == KINDS
    assert min(count.values()) >= 2


def check_refused(found: Outcome, words: str) -> None:
    for error in found.refused:
        assert error is not None, f"nobody was told; warnings: {found.said}"
        assert isinstance(error, ConfigError), found.told
        assert words in str(error)


def check_warned(found: Outcome, said: list[logging.LogRecord], words: str) -> None:
    """Each was told, and the run is over for nobody."""
    assert not found.errors, found.told
    assert all(script.round < ROUNDS for script in found.scripts)
    told = [record for record in said if record.levelno >= logging.WARNING and words in record.getMessage()]
    told = [record for record in told if "in the manifest" not in record.getMessage()]
    assert len(told) >= len(found.scripts)


def check_runs(found: Outcome) -> None:
    """Both made every round, of both, and hold the same; what the loop moved itself comes back after a restart."""
    assert not found.errors, found.told
    first, second = found.scripts
    assert (first.round, second.round) == (ROUNDS, ROUNDS)
    assert first.digest == second.digest
    assert [len(commit["contributors"]) for commit in found.commits()] == [2] * ROUNDS
    assert not differing(first.trained, first.after, second.after)
    assert differing(first.trained, first.before, first.after), "nothing was trained"
    assert all(bool(first.after[name].isfinite().all()) for name in first.trained)
    assert found.again is not None
    assert found.again.error is None, found.again.told
    assert not differing(first.trained, first.after, found.again.after)
    lost = [name for name in moved_by_the_loop(first) if as_made(name, first, found.again)]
    assert not lost, f"{sorted(lost)}: after a restart as the script made them"


def differing(names: set[str], one: dict[str, Tensor], other: dict[str, Tensor]) -> set[str]:
    return {name for name in names if not torch.equal(one[name], other[name])}


def moved_by_the_loop(script: Script) -> set[str]:
    return {name for name in script.after.keys() - script.trained if not as_made(name, script, script)}


def as_made(name: str, script: Script, other: Script) -> bool:
    """Whether the other one ended with what the script made; the same values as at the end would be too much to ask: a
    loop moves them after the last boundary, too, and that is in no checkpoint.
    """
    return torch.equal(script.before[name], other.after[name])


def check_learns(losses: list[float]) -> None:
    some = max(1, len(losses) // 4)
    assert sum(losses[-some:]) < sum(losses[:some]), losses
