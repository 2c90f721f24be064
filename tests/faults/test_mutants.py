"""Planted bugs stay plantable: who changes a line that a mutant breaks mends the mutant, too."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.faults.mutate import MUTANTS, ROOT, apply, shown_by

PATCHES = sorted(MUTANTS.glob("*.patch"))
_CHANGES = re.compile(r"^\+\+\+ b/(\S+)$", re.MULTILINE)


def copied(patch: Path, folder: Path) -> list[Path]:
    """The files that it changes, as they are today, in a folder of their own."""
    copies = []
    for name in _CHANGES.findall(patch.read_text(encoding="utf-8")):
        assert (ROOT / name).is_file(), f"{patch.name} changes {name}, which is not there any more: mend the patch"
        copies.append(folder / name)
        copies[-1].parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copies[-1])
    return copies


@pytest.mark.skipif(shutil.which("git") is None, reason="git applies the patches")
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_planted_bug_fits_the_source_of_today(patch: Path, tmp_path: Path) -> None:
    copies = copied(patch, tmp_path)
    before = [copy.read_text(encoding="utf-8") for copy in copies]
    try:
        apply(patch, tmp_path)
    except subprocess.CalledProcessError as error:
        pytest.fail(f"{patch.name} does not fit any more, mend it: {error.stderr.strip()}")
    after = [copy.read_text(encoding="utf-8") for copy in copies]
    assert copies
    assert all(old != new and ast.parse(new) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("patch", [patch for patch in PATCHES if shown_by(patch)], ids=lambda patch: patch.stem)
def test_the_test_that_shows_a_planted_bug_is_there(patch: Path) -> None:
    path, _, name = str(shown_by(patch)).partition("::")
    assert (ROOT / path).is_file()
    assert not name or f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(encoding="utf-8")
