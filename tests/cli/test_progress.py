"""How far a command is, beside what it prints; and how a simulation tells what it found."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from decentral.cli.progress import Countdown
from decentral.manifest import preset_manifest
from decentral.pipeline.turns import busy_share
from tests.cli.conftest import Run

SMALL = ("--parameters", "10k")  # told, they are not counted, which would import torch


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, seconds: float = 40.0, calls: int = 400, what: str = "") -> str:
    now = [0.0]
    with Countdown(stream, lambda: now[0], what=what) as countdown:
        for call in range(1, calls + 1):
            now[0] = seconds * call / calls
            countdown(call / calls)
    return stream.getvalue()


def test_a_pipe_gets_a_line_every_tenth_with_the_time_that_is_left() -> None:
    lines = shown(io.StringIO()).splitlines()
    assert lines[0] == "10% done, about 36 s left"
    assert lines[4] == "50% done, about 20 s left"
    assert len(lines) == 10
    assert shown(io.StringIO(), seconds=4000.0).startswith("10% done, about 60 min left")
    assert shown(io.StringIO(), seconds=20.0, calls=2, what="packing").startswith(
        "packing: 50% done, about 10 s left\n"
    )


def test_a_terminal_gets_one_line_that_is_refreshed_four_times_a_second_and_gone_in_the_end() -> None:
    text = shown(Terminal())
    assert "\n" not in text
    assert "[##########----------] 50% done, about 20 s left" in text
    assert text.count("left") <= 4 * 40
    assert text.endswith("\r\x1b[2K")


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_what_is_done_in_a_moment_says_nothing(stream: io.StringIO) -> None:
    assert shown(stream, seconds=1.9) == ""


def test_what_is_done_never_grows_less() -> None:
    stream, now = io.StringIO(), [0.0]
    with Countdown(stream, lambda: now[0]) as countdown:
        for share in (0.5, 0.3, 0.45, 0.4, 0.5, 0.6):  # of a swarm, as its foremost peer crashes and comes back
            now[0] += 10.0
            countdown(share)
    assert re.findall(r"(\d+)% done", stream.getvalue()) == ["50", "60"]


def test_a_benchmark_tells_how_far_it_is_beside_its_json(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decentral.cli.progress._QUIET_SECONDS", 0.0)
    found = run("bench", "compressors", "--rows", "64", "--repeats", "4", "--only", "none", "--json")
    assert found.exit_code == 0, found.output
    assert len(json.loads(found.stdout)) >= 1
    assert found.stderr.splitlines()[-1] == "100% done, about 0 s left"


def simulated(run: Run, preset: str, *asked: object, **outer: Any) -> Result:
    """Two peers over two rounds where nothing else is asked for."""
    manifest = preset_manifest(preset, inner={"steps": 3}, run={"salt": "countdown"}, outer=outer)
    Path("run.toml").write_text(manifest.to_toml())
    usual = ("--peers", "2", "--profile", "lab", "--rounds", "2", *SMALL)
    found = run("simulate", "run.toml", *usual, *asked)
    assert found.exit_code == 0, found.output
    return found


def test_a_simulation_keeps_its_json_apart_from_its_progress(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decentral.cli.progress._QUIET_SECONDS", 0.0)
    found = simulated(run, "sparseloco", "--rounds", "3", "--json")
    assert json.loads(found.stdout)["rounds"] == 3
    lines = found.stderr.splitlines()
    assert 1 < len(lines) <= 10
    assert lines[-1] == "100% done, about 0 s left"


def test_learning_is_told_with_what_is_compared_and_every_figure_is_in_the_docs(run: Run) -> None:
    found = simulated(run, "diloco", "--learn")
    (line,) = [line for line in found.stdout.splitlines() if line.startswith("loss ")]
    assert re.search(
        r"of a small model, after \d+ per peer; [\d.]+ for a median peer alone as long, which makes \d+ inner", line
    )
    page = (Path(__file__).parents[2] / "docs" / "simulation.md").read_text()
    for method in ("diloco", "noloco"):
        figures = json.loads(simulated(run, method, "--learn", "--json").stdout)
        assert [name for name in figures if f"`{name}`" not in page] == []


@pytest.mark.parametrize(
    ("preset", "outer"),
    [("noloco", {}), ("late_merge", {"first": 0.5})],  # whose pairs meet in every tenth step at first
)
def test_gossip_tells_its_pairs_where_rounds_tell_their_commits(run: Run, preset: str, outer: dict[str, float]) -> None:
    found = simulated(run, preset, "--peers", "4", "--rounds", "4", **outer)
    figures = dict(line.split(maxsplit=1) for line in found.stdout.splitlines()[1:])
    assert int(figures["pairs"]) > 0
    assert "unpaired" in figures
    assert not {"commits", "contributors"} & set(figures)


@pytest.mark.parametrize(
    ("asked", "by"),
    [
        (("--peers", "40"), "rounds"),
        (("--peers", "3"), "messages"),
        (("--peers", "3", "--by", "rounds"), "rounds"),
        (("--peers", "5", "--profile", "storm", "--rounds", "1"), "messages"),
    ],
)
def test_large_swarms_are_reckoned_by_rounds_where_they_can_be_and_it_says_so(
    run: Run, monkeypatch: pytest.MonkeyPatch, asked: tuple[str, ...], by: str
) -> None:
    monkeypatch.setattr("decentral.simulate.command.MANY", 4)  # peers; by messages its own number takes long
    told, plain = (simulated(run, "sparseloco", *asked, *more) for more in (("--json",), ()))
    assert json.loads(told.stdout)["by"] == by
    assert ("reckoned by rounds; --by messages runs the protocol" in plain.stdout) == (by == "rounds")
    assert ("divergence" in plain.stdout) == (by == "messages")


def test_a_forecast_of_fewer_rounds_than_were_asked_for_says_so(run: Run, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(preset_manifest("sparseloco", run={"salt": "by"}).to_toml())
    asked = "--by rounds --link 300kbit --rounds 9 --parameters 4000000000"
    found = run("simulate", "run.toml", *asked.split())
    assert found.stdout.startswith("only ")
    assert "of 9 rounds, which are too slow" in found.stdout


def test_a_replica_of_several_machines_is_reckoned_beside_a_whole_peer(run: Run, tmp_path: Path) -> None:
    model = {"hidden": 256, "layers": 6, "heads": 4, "tied": False}
    outer = {"fragments": 3, "layout": "stages"}
    terms = preset_manifest("sparseloco", run={"salt": "share"}, model=model, outer=outer, data={"batch_size": 24})
    (tmp_path / "run.toml").write_text(terms.to_toml())

    def found(*asked: str) -> dict[str, Any]:
        return json.loads(run("simulate", "run.toml", "--share", "3", "--json", *asked).stdout)

    home, thin, slow = found(), found("--link", "20mbit"), found("--link", "20mbit", "--step-time", "100s")
    assert (home["parts"], home["micro_batches"]) == ([[0, 1], [1, 2], [2, 3]], 12)
    assert home["utilisation"] == pytest.approx(busy_share(3, 12), rel=0.03), "stages are nearly alike"
    assert home["tokens_per_second"] == pytest.approx(3 * home["utilisation"] * home["whole_tokens_per_second"], 1e-3)
    assert [one["rounding"] for one in (home, thin, slow)] == ["exact", "int8", "exact"]
    assert thin["tokens_per_second"] < home["tokens_per_second"]
    page = (Path(__file__).parents[2] / "docs" / "simulation.md").read_text()
    assert [name for name in home if f"`{name}`" not in page] == []
    told = run("simulate", "run.toml", "--share", "3").stdout
    assert told.startswith("3 machines as one replica: ")
    assert "fragments 0, 1, 2" in told
