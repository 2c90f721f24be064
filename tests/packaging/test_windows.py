"""A swarm of two whose processes have what Windows has: nobody here owns a Windows machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kit.patience import PATIENCE

HERE = Path(__file__).parent
LOOPBACK = ("--listen", "/ip4/127.0.0.1/tcp/0", "--no-lan")
SMALL = {"hidden": 16, "layers": 1, "heads": 2, "context": 16}


def command(*words: str) -> list[str]:
    return [sys.executable, str(HERE / "as_on_windows.py"), *words]


@contextmanager
def running(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    env = os.environ | {"PYTHONPATH": str(HERE.parents[1])}
    with subprocess.Popen(
        command(*words), cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def done(folder: Path, *words: str) -> str:
    with running(folder, *words) as process:
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    return out


@pytest.mark.long
def test_two_peers_train_resume_and_export_without_what_windows_lacks_or_forbids(tmp_path: Path) -> None:
    done(tmp_path, "init", "run.toml", "--rounds", "3", "--inner-steps", "5")
    lines = (tmp_path / "run.toml").read_text().splitlines()
    small = [f"{key} = {SMALL[key]}" if (key := line.partition(" ")[0]) in SMALL else line for line in lines]
    (tmp_path / "run.toml").write_text("\n".join(small) + "\n")
    with running(tmp_path, "start", "run.toml", "--out", "first", *LOOPBACK) as first:
        assert first.stdout is not None
        invite = first.stdout.readline().split()[2]
        second = done(tmp_path, "join", invite, "--out", "second", "--json", *LOOPBACK)
        assert json.loads(second)["round"] == 3
        first.communicate(timeout=PATIENCE)
        assert first.returncode == 0
    done(tmp_path, "start", "run.toml", "--out", "first", *LOOPBACK)  # what it kept is opened again: the run is over
    done(tmp_path, "export", "first", "--to", "model")
    assert (tmp_path / "model/model.safetensors").exists()


def test_the_stand_in_forbids_what_windows_forbids(tmp_path: Path) -> None:
    """A stand-in that allows everything would show nothing."""
    program = """
import os, sys
sys.path.insert(0, sys.argv[1])
import as_on_windows
as_on_windows.OTHERS = ()
as_on_windows.become_windows()
refused = []
def refuses(call, *args):
    try:
        call(*args)
    except (OSError, ModuleNotFoundError, AttributeError) as error:
        refused.append(type(error).__name__)
with open("held", "w") as held, open("free", "w"):
    pass
with open("held") as held:
    refuses(os.replace, "free", "held")
    refuses(os.unlink, "held")
refuses(open, "a:b", "w")
refuses(os.open, ".", os.O_RDONLY)
refuses(__import__, "fcntl")
refuses(lambda: os.fork)
os.replace("free", "held")
print(*refused)
"""
    out = subprocess.run(
        [sys.executable, "-c", program, str(HERE)], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert out.stdout.split() == [
        *("PermissionError", "PermissionError", "OSError", "PermissionError"),
        *("ModuleNotFoundError", "AttributeError"),
    ]
