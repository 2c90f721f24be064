"""Plants one bug at a time and simulates: python -m tests.faults.mutate

Each patch in ``mutants/`` begins with what is wrong in it. It is caught when a seed of ``tests.simulate.run`` fails;
the same seeds pass without it. What only swarms with committees can show says so, and is simulated in those. What
chance brings about too seldom to count on, as a flipped bit in one field, and what a simulated chain does not show, as
a bug of a compressor or of a command, names the test that shows it instead, and is caught when that fails. Ends with 1
when one was not caught.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
MUTANTS = Path(__file__).parent / "mutants"
_WITH_COMMITTEES = re.compile(r"^In swarms with committees\.$", re.MULTILINE)
_SHOWN_BY = re.compile(r"^Shown by (tests/\S+)\.$", re.MULTILINE)


def planted(patch: Path, folder: Path) -> None:
    """A copy of the project with the bug. Raises CalledProcessError when the patch does not fit any more."""
    for name in ("decentral", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "corpus"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    apply(patch, folder)


def apply(patch: Path, folder: Path) -> None:
    """Plant the bug in what is in ``folder``. Raises CalledProcessError when the patch does not fit any more."""
    subprocess.run(["git", "apply", "-C1", str(patch)], cwd=folder, check=True, capture_output=True, text=True)


def shown_by(patch: Path) -> str | None:
    """The test that shows it, where chance does not."""
    found = _SHOWN_BY.search(patch.read_text(encoding="utf-8"))
    return found and found[1]


def caught(patch: Path, seeds: int, rounds: int, *, committees: bool = False) -> dict[str, object]:
    """What shows it: the first seed that fails and the rounds until then, or its test."""
    with tempfile.TemporaryDirectory(prefix="decentral-mutant-") as name:
        folder = Path(name)
        planted(patch, folder)
        test = shown_by(patch)
        committees = committees or bool(_WITH_COMMITTEES.search(patch.read_text(encoding="utf-8")))
        found = _simulated(folder, seeds, rounds, committees) if test is None else _tested(folder, test)
    return {"mutant": patch.stem, **found}


def _simulated(folder: Path, seeds: int, rounds: int, committees: bool) -> dict[str, object]:
    span = ("--seeds", f"1-{seeds}", "--rounds", str(rounds), "--processes", "1", "--failures", "1")
    span += ("--committees",) if committees else ()
    total = json.loads(_run(folder, "tests.simulate.run", *span).stdout)
    seed, problems = next(iter(total["failed"].items()), (None, [None]))
    return {"caught": seed is not None, "rounds": total["rounds"], "seed": seed and int(seed), "problem": problems[0]}


def _tested(folder: Path, test: str) -> dict[str, object]:
    """Without the bug the same test is part of ``make test``."""
    return {"caught": _run(folder, "pytest", "-q", test).returncode == 1, "test": test}


def _run(folder: Path, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def main(arguments: list[str] | None = None) -> int:
    """A line of JSON for each mutant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of a mutant's name")
    parser.add_argument("--seeds", type=int, default=220)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--committees", action="store_true", help="in swarms of which three or five peers vote")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(arguments)
    patches = [patch for patch in sorted(MUTANTS.glob("*.patch")) if options.only in patch.stem]
    with ThreadPoolExecutor(options.processes) as pool:
        missed = []
        how = functools.partial(caught, seeds=options.seeds, rounds=options.rounds, committees=options.committees)
        for found in pool.map(how, patches):
            print(json.dumps(found), flush=True)
            missed += [] if found["caught"] else [found["mutant"]]
    print(f"{len(patches) - len(missed)} of {len(patches)} caught; missed: {', '.join(map(str, missed)) or 'none'}")
    return 1 if missed or not patches else 0


if __name__ == "__main__":
    sys.exit(main())
