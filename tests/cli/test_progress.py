"""tests/cli/test_progress.py"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from decentral.cli.progress import Countdown
from decentral.manifest import preset_manifest
from tests.kit.tables import GOSSIPS

SMALL = ("--parameters", "10000")  # told, they are not counted, which would import transformers


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream, seconds=40.0, calls=400):
    now = [0.0]
    with Countdown(stream, lambda: now[0]) as countdown:
        for call in range(1, calls + 1):
            now[0] = seconds * call / calls
            countdown(call / calls)
    return stream.getvalue()


def test_a_pipe_gets_a_line_every_tenth_with_the_time_that_is_left():
    lines = shown(io.StringIO()).splitlines()
    assert lines[0] == "10% done, about 36 s left"
    assert lines[4] == "50% done, about 20 s left"
    assert len(lines) == 10


def test_a_terminal_gets_one_line_that_is_refreshed_four_times_a_second_and_gone_in_the_end():
    text = shown(Terminal())
    assert "\n" not in text
    assert "[##########----------] 50% done, about 20 s left" in text
    assert text.count("left") <= 4 * 40
    assert text.endswith("\r\x1b[2K")


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_what_is_done_in_a_moment_says_nothing(stream):
    assert shown(stream, seconds=1.9) == ""


def test_what_is_done_is_named_where_a_command_does_several_things():
    stream, now = io.StringIO(), [0.0]
    with Countdown(stream, lambda: now[0], what="packing") as countdown:
        now[0] = 10.0
        countdown(0.5)
    assert stream.getvalue() == "packing: 50% done, about 10 s left\n"


def test_a_benchmark_tells_how_far_it_is_beside_its_json(run, monkeypatch):
    monkeypatch.setattr("decentral.cli.progress._QUIET_SECONDS", 0.0)
    found = run("bench", "compressors", "--rows", "64", "--repeats", "4", "--only", "none", "--json")
    assert found.exit_code == 0, found.output
    assert len(json.loads(found.stdout)) >= 1
    assert found.stderr.splitlines()[-1] == "100% done, about 0 s left"


def test_hours_are_told_in_minutes():
    assert shown(io.StringIO(), seconds=4000.0).startswith("10% done, about 60 min left")


def test_a_simulation_keeps_its_json_apart_from_its_progress(run, tmp_path, monkeypatch):
    monkeypatch.setattr("decentral.cli.progress._QUIET_SECONDS", 0.0)
    manifest = preset_manifest("sparseloco", inner={"steps": 3}, run={"salt": "countdown"})
    (tmp_path / "run.toml").write_text(manifest.to_toml())
    found = run("simulate", "run.toml", "--peers", "2", "--profile", "lab", "--rounds", "3", *SMALL, "--json")
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["rounds"] == 3
    lines = found.stderr.splitlines()
    assert 1 < len(lines) <= 10
    assert lines[-1] == "100% done, about 0 s left"


def test_learning_is_told_with_what_is_compared(run, tmp_path):
    manifest = preset_manifest("diloco", inner={"steps": 3}, run={"salt": "countdown"})
    (tmp_path / "run.toml").write_text(manifest.to_toml())
    found = run("simulate", "run.toml", "--peers", "2", "--profile", "lab", "--rounds", "2", *SMALL, "--learn")
    (line,) = [line for line in found.stdout.splitlines() if line.startswith("loss ")]
    assert re.search(
        r"of a small model, after \d+ per peer; [\d.]+ for a median peer alone as long, which makes \d+ inner", line
    )


def test_what_is_done_never_grows_less():
    stream, now = io.StringIO(), [0.0]
    with Countdown(stream, lambda: now[0]) as countdown:
        for share in (0.5, 0.3, 0.45, 0.4, 0.5, 0.6):  # of a swarm, as its foremost peer crashes and comes back
            now[0] += 10.0
            countdown(share)
    assert re.findall(r"(\d+)% done", stream.getvalue()) == ["50", "60"]


@pytest.mark.parametrize("preset", GOSSIPS)
def test_gossip_tells_its_pairs_where_rounds_tell_their_commits(run, tmp_path, preset):
    outer = {"first": 0.5} if preset == "late_merge" else {}  # where pairs meet in every tenth step at first
    manifest = preset_manifest(preset, inner={"steps": 3}, run={"salt": "countdown"}, outer=outer)
    (tmp_path / "run.toml").write_text(manifest.to_toml())
    found = run("simulate", "run.toml", "--peers", "4", "--profile", "lab", "--rounds", "4", *SMALL)
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
        (("--peers", "16", "--profile", "storm", "--rounds", "1"), "messages"),
    ],
)
def test_large_swarms_are_reckoned_by_rounds_where_they_can_be_and_it_says_so(run, tmp_path, asked, by):
    manifest = preset_manifest("sparseloco", inner={"steps": 3}, run={"salt": "by"})
    (tmp_path / "run.toml").write_text(manifest.to_toml())
    profile = () if "--profile" in asked else ("--profile", "lab", "--rounds", "2")
    told, plain = (run("simulate", "run.toml", *asked, *profile, *SMALL, *more) for more in (("--json",), ()))
    assert json.loads(told.stdout)["by"] == by
    assert ("reckoned by rounds; --by messages runs the protocol" in plain.stdout) == (by == "rounds")
    assert ("divergence" in plain.stdout) == (by == "messages")


def test_a_forecast_of_fewer_rounds_than_were_asked_for_says_so(run, tmp_path):
    (tmp_path / "run.toml").write_text(preset_manifest("sparseloco", run={"salt": "by"}).to_toml())
    found = run(
        "simulate", "run.toml", "--by", "rounds", "--link", "300kbit", "--rounds", "9", "--parameters", "4000000000"
    )
    assert found.stdout.startswith("only ")
    assert "of 9 rounds, which are too slow" in found.stdout


def test_every_figure_of_a_simulation_is_in_the_docs(run, tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "simulation.md").read_text()
    for method in ("diloco", "noloco"):
        manifest = preset_manifest(method, inner={"steps": 3}, run={"salt": "countdown"})
        (tmp_path / "run.toml").write_text(manifest.to_toml())
        asked = (
            "simulate",
            "run.toml",
            "--peers",
            "2",
            "--profile",
            "lab",
            "--rounds",
            "2",
            *SMALL,
            "--learn",
            "--json",
        )
        found = json.loads(run(*asked).stdout)
        assert [name for name in found if f"`{name}`" not in text] == []
