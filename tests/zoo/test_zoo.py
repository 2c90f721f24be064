"""Each loop of the zoo runs unchanged with two peers that agree, or is refused by name."""

from __future__ import annotations

import statistics
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decentral.errors import ConfigError
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
# What does not end as it should yet, and how it ends.
FROZEN = "a parameter that is frozen for a moment ends the peer"
LOST = "what no gradient trains is in no checkpoint"
MOVED = "join has no moved="
OWNED = "what a commit wrote is undone by the next step, and nobody is told"
NOT_YET = {
    "adafactor_without_a_rate": "TypeError: float() of a rate that is None",
    "byol": LOST,
    "byol_as_told": MOVED,
    "cpu_offload": OWNED,
    "data_parallel": "ManifestMismatch: the names begin with module.",
    "ddpm_with_ema_inside": LOST,
    "ddpm_with_ema_inside_as_told": MOVED,
    "dino": LOST,
    "dino_as_told": MOVED,
    "growing_memory": "RuntimeError in a restart: the buffer has another size",
    "growing_memory_of_one": "ManifestMismatch at a boundary: the buffer has another size",
    "lazy_modules_too_early": "RuntimeError: an uninitialized parameter has no shape",
    "lookahead": OWNED,
    "lookahead_around": "the optimizer around it undoes half of a commit in the step that brought it",
    "master_copies": OWNED,
    "mean_teacher": LOST,
    "mean_teacher_as_told": MOVED,
    "meta_device": "NotImplementedError: Cannot copy out of meta tensor",
    "moco": "the queue's pointer is averaged",
    "moco_as_told": MOVED,
    "new_head": "a parameter that is replaced by one of its shape is not seen",
    "pix2pix": FROZEN,
    "private_sgd": "AttributeError: the optimizer has no hooks, its class calls no __init__ of Optimizer",
    "relora": LOST,
    "relora_as_told": MOVED,
    "resized_embeddings": "KeyError in the optimizer's state_dict at the checkpoint",
    "rotary_cache": "ManifestMismatch at a boundary: the buffer has another size",
    "sac": LOST,
    "sac_as_told": MOVED,
    "stepped_by_hand": "p.data raises no version, so the watch sees nothing",
    "wgan": "100 steps of one optimizer while the other has made none end the peer",
    "wgan_gp": FROZEN,
    "word2vec_by_scaffold": "RuntimeError: reshape is not implemented for sparse tensors",
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.xfail(strict=True, reason=NOT_YET[name])) if name in NOT_YET else name
        for name in LOOPS
    ],
)
def test_a_loop_as_people_write_it_runs_or_is_refused_by_name(name: str, tmp_path: Path) -> None:
    row = LOOPS[name]
    found = trained_together(row, tmp_path)
    if row.refused:
        check_refused(found, row.refused)
        return
    check_runs(found)
    if row.learns:
        for script in found.scripts:
            check_learns(script.losses)
    if row.kind == owners.KIND:
        for script in found.scripts:
            assert not script.leaps or statistics.median(script.leaps) < 3, f"steps undo commits: {script.leaps}"


def test_there_are_thirty_loops_of_every_kind_of_which_four_fifths_run() -> None:
    assert len(LOOPS) >= 30
    running = [name for name, row in LOOPS.items() if not row.refused and name not in NOT_YET]
    assert len(running) >= 0.8 * 30
    count = Counter(row.kind for row in LOOPS.values())
    assert set(count) == KINDS
    assert min(count.values()) >= 2


def check_refused(found: Outcome, words: str) -> None:
    for error in found.refused:
        assert error is not None, f"nobody was told; warnings: {found.said}"
        assert isinstance(error, ConfigError), found.told
        assert words in str(error)


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
