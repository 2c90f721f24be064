"""Plants one bug at a time and simulates: python -m tests.faults.mutate

Each patch in ``mutants/`` begins with what is wrong in it, and may say which seeds show it, where few do. It is caught
when a seed of ``tests.simulate.run`` fails; the same seeds pass without it. Ends with 1 when one was not caught.
"""

from __future__ import annotations

import argparse
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
_SHOWN_BY = re.compile(r"^Shown by seeds ([\d-]+) of (\d+) rounds\.$", re.MULTILINE)


def planted(patch: Path, folder: Path) -> None:
    """A copy of the project with the bug. Raises CalledProcessError when the patch does not fit any more."""
    for name in ("decentral", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "corpus"))
    subprocess.run(["git", "apply", "-C1", str(patch)], cwd=folder, check=True, capture_output=True, text=True)


def caught(patch: Path, seeds: int, rounds: int) -> dict[str, object]:
    """What the simulation says of it: the first seed that fails, and the rounds until then."""
    with tempfile.TemporaryDirectory(prefix="decentral-mutant-") as name:
        folder = Path(name)
        planted(patch, folder)
        shown = _SHOWN_BY.search(patch.read_text())
        span, length = shown.groups() if shown else (f"1-{seeds}", str(rounds))
        command = [sys.executable, "-m", "tests.simulate.run", "--seeds", span, "--rounds", length]
        command += ["--processes", "1", "--failures", "1"]
        env = {**os.environ, "PYTHONPATH": str(folder)}
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    total = json.loads(done.stdout)
    found = next(iter(total["failed"].items()), None)
    seen = {"seed": None, "problem": None} if found is None else {"seed": int(found[0]), "problem": found[1][0]}
    return {"mutant": patch.stem, "caught": found is not None, "rounds": total["rounds"], **seen}


def main(arguments: list[str] | None = None) -> int:
    """A line of JSON for each mutant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of a mutant's name")
    parser.add_argument("--seeds", type=int, default=220)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(arguments)
    patches = [patch for patch in sorted(MUTANTS.glob("*.patch")) if options.only in patch.stem]
    with ThreadPoolExecutor(options.processes) as pool:
        missed = []
        for found in pool.map(lambda patch: caught(patch, options.seeds, options.rounds), patches):
            print(json.dumps(found), flush=True)
            missed += [] if found["caught"] else [found["mutant"]]
    print(f"{len(patches) - len(missed)} of {len(patches)} caught; missed: {', '.join(map(str, missed)) or 'none'}")
    return 1 if missed or not patches else 0


if __name__ == "__main__":
    sys.exit(main())
