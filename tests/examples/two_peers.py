"""Examples in swarms of two, on loopback: the first peer in another process, the second in the test's.

One process runs the first peers of all of them, one after the other: most of what an example costs is its imports.
A first peer is told nothing but to keep to loopback, and says its invite as it would to a person.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from decentral.observe.status import Status, read_status
from decentral.peer.settings import handed_over

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NET = {"listen": ("/ip4/127.0.0.1/tcp/0",), "lan": False}
HANGS = 240  # s: Lightning's modules alone take four to be taken down, where nothing else runs
ENDED = "ended: "  # how the first peers' process says that one is done


def run_example(script: Path, arguments: Sequence[str], join: Mapping[str, Any]) -> dict[str, Any]:
    """The example as ``__main__`` in this process; returns its globals."""
    argv = sys.argv
    sys.argv = [str(script), *arguments]
    try:
        with handed_over({**NET, **join}):
            return runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv = argv


class FirstPeers:
    """The other process, to be told which example to run next."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process, self._said = process, list[str]()

    def swarm_of_two(self, name: str, folder: Path, *arguments: str) -> list[Status]:
        """Both peers train until the run is over; what each of them said last of itself."""
        script, outs = EXAMPLES / name, [folder / "first", folder / "second"]
        invite = self.begin(name, outs[0], *arguments)
        try:
            run_example(script, ["--out", str(outs[1]), "--seed", "1", *arguments], {"run": invite, "out": outs[1]})
        except BaseException:
            self._process.kill()  # it would train on alone, and the next example wait for it
            raise
        assert self._until(f"{ENDED}(.*)") == "well", "".join(self._said)
        return [read_status(out) for out in outs]

    def begin(self, name: str, out: Path, *arguments: str) -> str:
        """Its first peer begins in ``out``; returns the invite that it says."""
        assert self._process.stdin is not None
        print(json.dumps([str(EXAMPLES / name), "--out", str(out), *arguments]), file=self._process.stdin, flush=True)
        return self._until(r"decentral join (\S+)")

    def interrupt(self) -> None:
        """Ctrl-C: the example ends, and the process with it."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(HANGS)

    def _until(self, pattern: str) -> str:
        """The first group of the next line that holds the pattern."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said.append(line)
            if found := re.search(pattern, line):
                return found[1]
            assert not line.startswith(ENDED), "".join(self._said)
        raise AssertionError("".join(self._said))


@contextmanager
def first_peers(packages: Path) -> Iterator[FirstPeers]:
    """The process lives while the block lasts; it finds what is installed in ``packages``, too."""
    command = [sys.executable, "-u", "-m", "tests.examples.two_peers"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(packages), str(ROOT)])}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            yield FirstPeers(process)
        finally:
            process.kill()


def main() -> None:
    """Run what each line of stdin says."""
    for line in sys.stdin:
        script, *arguments = json.loads(line)
        try:
            run_example(Path(script), arguments, {})
        except Exception:  # noqa: BLE001 - said on stdout, where a test shows it
            traceback.print_exc()
            print(f"{ENDED}badly", flush=True)
        else:
            print(f"{ENDED}well", flush=True)


if __name__ == "__main__":
    main()
