"""A whole peer alone, and with a replica of two machines that are each too small: who learns more in the same time?

    python -m experiments.stages.pays --minutes 4 --compute 100% 40%

The model and the text are the demo's. The whole peer has a core of its own and computes for ``--compute`` of the time;
the two machines share another core, half of it each, and have no memory for the whole model by their own ``--memory``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ENTRY = [sys.executable, "-m", "decentral"]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument(
        "--compute", nargs="*", default=["100%"], help="of the whole peer's core, one pair of runs each"
    )
    parser.add_argument("--memory", default="909MB", help="of each of the two: less than the whole model takes")
    return parser.parse_args()


def main() -> None:
    """See above."""
    given = options()
    for compute in given.compute:
        for together in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                found = run(given, Path(folder), compute, together=together)
                print(json.dumps({"compute": compute, "together": together, **found}), flush=True)


def run(given: argparse.Namespace, folder: Path, compute: str, *, together: bool) -> dict[str, object]:
    """Train, and return what the model is worth and the inner steps of each machine."""
    terms = folder / "run.toml"
    subprocess.run(
        [*ENTRY, "init", terms, "--stages", "4", "--minutes", str(given.minutes), "--rounds", "100000"],
        check=True,
        capture_output=True,
    )
    shared = ["--threads", "1", "--transport", "native", "--no-lan"]
    start = ["start", str(terms), "--max-compute", compute, *([] if together else ["--alone"])]
    with ended([]) as machines:
        machines.append(begin(folder / "whole", 0, [*start, *shared]))
        if together:
            invite = invite_of(machines[0])
            for name in ("first", "second"):
                join = ["join", invite, "--share", "--memory", given.memory]
                machines.append(begin(folder / name, 1, [*join, *shared]))
        for machine in machines:
            machine.communicate(timeout=60 * given.minutes + 300)
    told = subprocess.run([*ENTRY, "evaluate", folder / "whole", "--json"], check=True, capture_output=True, text=True)
    steps = {one.name: steps_of(one) for one in sorted(folder.iterdir()) if one.is_dir()}
    return {"evaluated": json.loads(told.stdout), "steps": steps}


@contextmanager
def ended(machines: list[subprocess.Popen[str]]) -> Iterator[list[subprocess.Popen[str]]]:
    """End what was started."""
    try:
        yield machines
    finally:
        for machine in machines:
            machine.kill()
            machine.wait()


def begin(out: Path, core: int, command: list[str]) -> subprocess.Popen[str]:
    """Start a machine on one core."""
    made = subprocess.Popen(
        [*ENTRY, *command, "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    os.sched_setaffinity(made.pid, {core})
    return made


def invite_of(machine: subprocess.Popen[str]) -> str:
    assert machine.stdout is not None
    for line in machine.stdout:
        if found := re.search(r"decentral join (\S+)", line):
            return found[1]
    raise SystemExit(f"the first peer ended with {machine.wait()}")


def steps_of(out: Path) -> int:
    """Inner steps, as the newest status says."""
    return int(json.loads((out / "status.json").read_text())["inner_steps"])


if __name__ == "__main__":
    main()
