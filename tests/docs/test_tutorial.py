"""docs/tutorial.md, executed: every command in its order, in an empty folder, on a tiny model and over loopback."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from decentral.cli.demo_processes import DemoProcess, Family
from decentral.manifest.files import load_manifest
from decentral.observe.status import read_status
from tests.docs.commands import FENCE, commands_of
from tests.kit.patience import PATIENCE, until

PAGE = Path(__file__).parents[2] / "docs/tutorial.md"
LOOPBACK = ["--listen", "/ip4/127.0.0.1/tcp/0", "--no-lan", "--transport", "native"]
SMALL = {"hidden": 16, "layers": 1, "heads": 2, "context": 16}


class Reader:
    """Types what the page says in the working directory; what runs on stays, as in a terminal of its own."""

    def __init__(self, family: Family) -> None:
        self.family, self.invite = family, ""
        self.others: list[DemoProcess] = []

    def type(self, words: list[str]) -> str:
        """What a command prints, all of it or the line from which the page goes on."""
        words = [self.invite if word == "INVITE" else word for word in words]
        match words:
            case ["decentral", "demo", *_]:
                return done([*words, "--peers", "2", "--minutes", "0.2", "--no-churn"], patience=3 * PATIENCE)
            case ["decentral", "dashboard", *_]:
                return self.left([*words, "--port", "0"])
            case ["decentral", "start", *_] | ["python", _]:
                return self.invited(self.left(words + (LOOPBACK if words[0] == "decentral" else [])))
            case ["decentral", "join", *_, "--out", "second"]:
                self.left([*words, *LOOPBACK], speaks=False)
                return self.trained(Path("second"))
            case ["decentral", "join", *_]:
                return done([*words, *LOOPBACK])
            case ["decentral", "pause", *_, "--out", folder, "--for", _]:
                return done(words) + self.paused(Path(folder))
            case ["decentral", "init", file, *_]:
                return done(words) + shrunk(Path(file))
        return done(words)

    def left(self, words: list[str], speaks: bool = True) -> str:
        """Start what goes on; its first line."""
        number = len(self.others)
        self.others.append(self.family.start_command(words[1], Path(f"said-{number}"), program(words)))
        return self.others[-1].first_line(PATIENCE) if speaks else ""

    def invited(self, line: str) -> str:
        found = re.fullmatch(r"decentral join (decentral1:\S+)( --script train\.py)?", line)
        assert found, line
        self.invite = found[1]
        return line

    def trained(self, folder: Path) -> str:
        """The peer's sentence of health once it took part in two rounds."""
        until(lambda: (folder / "status.json").exists() and read_status(folder).rounds_contributed >= 2)
        return read_status(folder).health

    def paused(self, folder: Path) -> str:
        """Nothing more to say, once the peer has heard of it: it looks for requests about once a second."""
        until(lambda: read_status(folder).state == "paused")
        return ""


def program(words: list[str]) -> list[str]:
    return [sys.executable, *(["-m", "decentral"] if words[0] == "decentral" else []), *words[1:]]


def done(words: list[str], patience: float = PATIENCE) -> str:
    """The stdout of a command that ends, and ends well."""
    ended = subprocess.run(program(words), capture_output=True, text=True, timeout=patience, check=False)
    assert ended.returncode == 0, f"{words}: {ended.stderr}"
    return ended.stdout


def shrunk(file: Path) -> str:
    """The page's terms with a tiny model and no end, so that the steps in between have all the time they need."""
    terms = load_manifest(file)
    if terms.model.task != "custom":
        file.write_text(terms.changed(model=SMALL, run={"rounds": 10**6}).to_toml())
    return ""


def save_script() -> None:
    (script,) = [block for language, block in FENCE.findall(PAGE.read_text(encoding="utf-8")) if language == "python"]
    here = 'out="loop-first", listen=("/ip4/127.0.0.1/tcp/0",), lan=False'
    assert 'out="loop-first"' in script
    Path("train.py").write_text(script.replace('out="loop-first"', here))


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with Family() as family:
        yield Reader(family)
        family.end()
        assert family.count_strays() == 0


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_tutorial_works_from_its_first_command_to_its_last(reader: Reader):
    save_script()
    said = [(words, reader.type(words)) for words in commands_of(PAGE)]

    health = [text.splitlines()[0] for words, text in said if words[1] == "status"]
    assert len(health) == 2, "before the pause and in it"
    assert "paused" in health[1]
    assert Path("model/model.safetensors").exists()
    assert next(text for words, text in said if words[1] == "generate").startswith("def main(")
    first, second = read_status(Path("loop-first")), read_status(Path("loop-second"))
    assert first.round == second.round == 20
    assert first.anchor_digest == second.anchor_digest != ""
