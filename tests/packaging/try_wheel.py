"""Try the built wheel as a user has it: in an environment of its own, outside the repository.

    python -m tests.packaging.try_wheel

The environment has the wheel, and sees what this one has installed beside it, so that nothing is downloaded; the
package itself comes from the wheel alone, which is checked. It runs the demo, makes a manifest, has two peers train by
it, opens what they export, and asks pip whether each extra can be had with what is pinned.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = (
    "daemon",
    "dashboard",
    "figures",
    "lightning",
    "lora",
    "lab",
    "simulate",
    "transformers",
    "watch",
    "libp2p",
    "all",
)
LOOPBACK = ("--listen", "/ip4/127.0.0.1/tcp/0", "--no-lan")
BUILD = "import sys; from hatchling import build; print(build.build_wheel(sys.argv[1]))"


class Trial:
    """An environment with the wheel, and commands that run in an empty folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.work = folder, folder / "work"
        self.work.mkdir()
        self.env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        self.python = folder / "env" / "bin" / "python"

    def build(self) -> Path:
        """The wheel of this checkout."""
        built = subprocess.run([sys.executable, "-c", BUILD, self.folder], cwd=ROOT, check=True, stdout=subprocess.PIPE)
        return self.folder / built.stdout.decode().split()[-1]

    def install(self, wheel: Path) -> None:
        """Into an environment that also sees the packages of this one, but for the package itself."""
        subprocess.run([sys.executable, "-m", "venv", self.folder / "env"], check=True)
        (place,) = (self.folder / "env" / "lib").glob("python*/site-packages")
        beside = self.folder / "beside"
        beside.mkdir()
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            if not entry.name.startswith(("decentral", "_decentral", "__editable__", "_editable_impl_decentral")):
                (beside / entry.name).symlink_to(entry)
        (place / "beside.pth").write_text(f"{beside}\n")
        self.pip("install", "--no-deps", "--quiet", str(wheel))

    def pip(self, *words: str) -> str:
        """What pip says."""
        return self.run(str(self.python), "-m", "pip", "--disable-pip-version-check", *words)

    def decentral(self, *words: str, timeout: float = 600.0) -> str:
        """What the installed command says on stdout."""
        return self.run(str(self.folder / "env" / "bin" / "decentral"), *words, timeout=timeout)

    def run(self, *command: str, timeout: float = 600.0) -> str:
        """In the empty folder; its stdout. Raises SystemExit with what it said when it fails."""
        done = subprocess.run(
            command, cwd=self.work, env=self.env, capture_output=True, text=True, timeout=timeout, check=False
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def start(self, *words: str) -> subprocess.Popen[str]:
        """A peer that runs on."""
        return subprocess.Popen(
            [str(self.folder / "env" / "bin" / "decentral"), *words],
            cwd=self.work,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=(self.work / "stderr.txt").open("w"),
            text=True,
        )


def is_of_the_wheel(trial: Trial) -> None:
    """Or the repository would be tried."""
    where = trial.run(str(trial.python), "-c", "import decentral; print(decentral.__file__)").strip()
    assert Path(where).is_relative_to(trial.folder / "env"), where


def two_peers(trial: Trial) -> None:
    """As two people would have them, but for the size."""
    trial.decentral("init", "run.toml", "--rounds", "2", "--inner-steps", "5")
    first = trial.start("start", "run.toml", "--out", "first", *LOOPBACK)
    try:
        assert first.stdout is not None
        invite = first.stdout.readline().split()[2]
        found = json.loads(trial.decentral("join", invite, "--out", "second", "--json", *LOOPBACK))
        assert found["round"] == 2, found
        assert first.wait(120) == 0, (trial.work / "stderr.txt").read_text()
    finally:
        first.kill()
        first.wait()
    trial.decentral("export", "second", "--to", "model")
    opens = "from transformers import AutoModelForCausalLM as A; print(A.from_pretrained('model').num_parameters())"
    assert int(trial.run(str(trial.python), "-c", opens)) > 100_000


def extras_resolve(trial: Trial, wheel: Path, extras: tuple[str, ...]) -> None:
    """With the pinned versions; nothing is installed."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras) <= set(declared)
    for extra in extras:
        trial.pip("install", "--dry-run", "--quiet", "-c", str(ROOT / "constraints.txt"), f"{wheel}[{extra}]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", default="0.5", help="of the demo")
    parser.add_argument("--without", action="append", default=[], help="an extra that cannot be had here")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="decentral-wheel-") as folder:
        trial = Trial(Path(folder))
        wheel = trial.build()
        trial.install(wheel)
        is_of_the_wheel(trial)
        extras = tuple(extra for extra in EXTRAS if extra not in given.without)
        for name, step in {
            f"extras {', '.join(extras)}": lambda: extras_resolve(trial, wheel, extras),
            "init, start, join, export": lambda: two_peers(trial),
            "demo": lambda: trial.decentral("demo", "--minutes", given.minutes, "--peers", "3", "--no-churn"),
        }.items():
            began = time.monotonic()
            step()
            print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
