import json
import re
import time
from dataclasses import replace
from pathlib import Path

import click
import pytest

from decentral.cli import COMMANDS
from decentral.manifest import load_manifest
from decentral.observe.events import EVENTS_FILE, EventLog
from decentral.observe.lines import pack_put_aside, put_aside
from decentral.observe.requests import Request, take_requests
from decentral.observe.status import ProcessInfo, read_status, write_status
from decentral.optimizers import make_outer
from decentral.optimizers.slowmo import SlowMo
from tests.cli.conftest import Run, every_command
from tests.kit.tables import PRESETS

EVERY_COMMAND = dict(every_command())


@pytest.mark.parametrize("name", EVERY_COMMAND)
def test_every_help_has_an_example_of_that_command(run: Run, name: str) -> None:
    result = run(*name.split(), "--help")
    assert result.exit_code == 0
    assert f"$ decentral {name}" in result.output


def test_help_shows_the_commands_by_what_they_are_for(run: Run) -> None:
    shown = run("--help").output
    parts = [part.splitlines() for part in shown.split("\n\n")]
    headed = {lines[0]: [line.split()[0] for line in lines[1:]] for lines in parts if lines[0] in ("Run:", "Steer:")}
    assert headed["Run:"][:4] == ["demo", "init", "start", "join"]
    assert {"pause", "resume", "leave"} <= set(headed["Steer:"])
    assert all(f"\n  {name} " in shown for name in COMMANDS)


@pytest.mark.parametrize("name", EVERY_COMMAND)
def test_every_option_says_what_it_is_for(name: str) -> None:
    for parameter in EVERY_COMMAND[name].params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{name} {parameter.opts}"


REPORTING = (
    "status",
    "peers",
    "logs",
    "doctor",
    "optimizers",
    "aggregation",
    "compressors",
    "feedback",
    "bench compressors",
    "demo",
    "start",
    "join",
    "export",
    "follow",
    "lab",
)


@pytest.mark.parametrize("name", REPORTING)
def test_every_command_that_reports_can_do_so_in_json(name: str) -> None:
    assert any("--json" in parameter.opts for parameter in EVERY_COMMAND[name].params)


CHEAP_EXAMPLES = [
    ("init", []),
    ("optimizers", ["SparseLoCo", "arXiv:2508.15706"]),
    ("aggregation", ["norm_clip", "f=1 then=rfa", "arXiv:1912.13445"]),
    ("feedback", ["ef(beta=0.95)", "econtrol", "arXiv:2311.05645"]),
    ("compressors", ["topk"]),
    ("status", ["healthy: round 41, you contributed to 40 of the last 41, 0.2 MB sent per round"]),
    ("peers", ["12D3KooWother"]),
    ("logs", ["commit"]),
    ("pause", ["asked: the peer will pause"]),
    ("resume", ["asked: the peer trains on"]),
]


@pytest.mark.parametrize(("name", "fragments"), CHEAP_EXAMPLES, ids=[name for name, _ in CHEAP_EXAMPLES])
def test_the_example_in_the_help_runs(run: Run, running_peer: Path, name: str, fragments: list[str]) -> None:
    log = EventLog(running_peer)
    log("commit", round=3)
    log.close()
    help_text = EVERY_COMMAND[name].help
    assert help_text is not None
    examples = re.findall(r"^ *\$ decentral (.*)$", help_text, re.MULTILINE)
    assert examples
    for example in examples:
        result = run(*example.split())
        assert result.exit_code == 0, result.stderr
        for fragment in fragments:
            assert fragment in result.stdout


def test_logs_of_some_time_leave_out_what_was_before(run: Run, running_peer: Path) -> None:
    log = EventLog(running_peer, wall=iter((time.time() - 7200, *[time.time() - 60] * 30)).__next__)
    for number in range(31):
        log("round", number=number)
    log.close()
    assert re.findall(r"number=(\d+)", run("logs", "--since", "1h").stdout) == [str(n) for n in range(1, 31)]
    assert len(run("logs", "--since", "1h", "--last", "5").stdout.splitlines()) == 5
    assert "no event in that time" in run("logs", "--since", "1s").stderr


def test_what_a_loop_logs_every_step_does_not_push_out_what_happened(run: Run, running_peer: Path) -> None:
    log = EventLog(running_peer)
    log("commit", round=3)
    for step in range(30):
        log("metrics", inner_step=step, loss=1.0)
    log.close()
    assert re.findall(r"commit|metrics", run("logs").stdout) == ["commit"]
    assert len(run("logs", "--event", "metrics").stdout.splitlines()) == 20


def test_logs_are_read_also_where_all_of_them_lie_packed(run: Run, running_peer: Path) -> None:
    log = EventLog(running_peer)
    log("commit", round=3)
    log.close()
    put_aside(running_peer / EVENTS_FILE)
    pack_put_aside(running_peer / EVENTS_FILE)
    assert "round=3" in run("logs").stdout
    log = EventLog(running_peer)
    log("commit", round=4)
    log.close()
    assert re.findall(r"round=(\d)", run("logs").stdout) == ["3", "4"]


def test_the_version_is_told(run: Run) -> None:
    assert re.match(r"decentral \d+\.\d+", run("--version").output)


def test_no_command_at_all_shows_the_help(run: Run) -> None:
    result = run()
    assert result.exit_code == 2
    assert "Run:" in result.stderr


@pytest.mark.parametrize("preset", [name for name in PRESETS if not make_outer(name, {}).begins_apart])
def test_a_manifest_of_every_preset_is_written_with_comments_and_loads(run: Run, tmp_path: Path, preset: str) -> None:
    assert run("init", "run.toml", "--preset", preset).exit_code == 0
    text = (tmp_path / "run.toml").read_text()
    assert load_manifest(tmp_path / "run.toml").outer.method == preset
    for line in text.splitlines():
        assert not line.strip() or "#" in line, f"no comment: {line}"


def test_a_preset_that_was_not_better_than_a_peer_alone_is_told_of(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(run("init", "one.toml", "--preset", "slowmo").stdout.splitlines()) == 1
    monkeypatch.setattr(SlowMo, "preset", replace(SlowMo.preset, behind="slowmo was behind a peer alone."))
    assert run("init", "two.toml", "--preset", "slowmo").stdout.splitlines()[0] == "slowmo was behind a peer alone."


def test_overrides_end_up_in_the_manifest(run: Run, tmp_path: Path) -> None:
    options = "--name mine --seed 7 --rounds 9 --minutes 5 --inner-steps 11 --min-peers 2 --corpus novels --overlap 3"
    assert run("init", "run.toml", *options.split(), "--experts", "4", "--compressor", "int8(block=64)").exit_code == 0
    manifest = load_manifest(tmp_path / "run.toml")
    assert (manifest.run.name, manifest.run.seed, manifest.run.rounds, manifest.run.minutes) == ("mine", 7, 9, 5)
    assert (manifest.inner.steps, manifest.swarm.min_peers, manifest.data.corpus) == (11, 2, "novels")
    assert (manifest.outer.overlap, manifest.compressor.chain) == (3, "int8(block=64)")
    assert manifest.model.experts == 4


def test_the_status_shows_the_limits_and_the_measured_uplink_of_a_peer_that_has_them(
    run: Run, running_peer: Path
) -> None:
    assert "limits" not in run("status").stdout
    status = replace(read_status(running_peer), max_upload=625_000.0, uplink_bits=4_900_000)
    write_status(running_peer, replace(status, daily_upload=50 * 10**9, sent_today=12 * 10**9), ProcessInfo())
    shown = run("status").stdout
    assert "limits    5 Mbit/s up, 12.0 GB of 50.0 GB sent today (UTC)\n" in shown
    assert "uplink    4.9 Mbit/s, from the transfers made\n" in shown


def test_the_status_shows_the_losses_the_time_left_and_what_speed_tests_cost(run: Run, running_peer: Path) -> None:
    assert "loss" not in run("status").stdout
    status = replace(read_status(running_peer), loss=2.5, held_out_loss=2.75, seconds_left=1800.0)
    write_status(running_peer, replace(status, bytes_measuring=1_048_578), ProcessInfo())
    shown = run("status").stdout
    assert "loss      2.5000, held-out 2.7500, nats per token\n" in shown
    assert "left      30 min, as it goes now\n" in shown
    assert "besides   1.0 MB sent to peers that measured this line" in shown


def test_the_status_shows_what_the_newest_round_told_of_the_swarm(run: Run, running_peer: Path) -> None:
    assert "updates" not in run("status").stdout
    figures = {"norm_dispersion": 0.9, "mean_cosine": 0.05, "debt_ratio": 3.0, "never_sent": 0.25}
    status = replace(read_status(running_peer), diagnostics=figures, diagnosed_round=41)
    write_status(running_peer, status, ProcessInfo())
    line = "updates   norms differ by 90%, mean cosine 0.050, owed 3 x a round's update, 25% never sent (round 41)"
    assert f"{line}\n" in run("status").stdout
    write_status(running_peer, replace(status, diagnosed_part=True, out_of_band=("norm_dispersion",)), ProcessInfo())
    assert "(round 41, of the part that this peer sums); out of band: norm_dispersion\n" in run("status").stdout


def test_the_status_tells_prometheus_in_one_format_at_a_time(run: Run, running_peer: Path) -> None:
    told = run("status", "--prometheus")
    assert told.exit_code == 0
    assert "decentral_peer_up 1.0\n" in told.stdout
    assert all(
        line.startswith(("# HELP decentral_peer_", "# TYPE decentral_peer_", "decentral_peer_"))
        for line in told.stdout.splitlines()
    )
    assert run("status", "--prometheus", "--json").exit_code == 2


def test_status_in_json_has_every_field_and_whether_the_peer_is_alive(run: Run, running_peer: Path) -> None:
    told = json.loads(run("status", "--json").stdout)
    assert told["alive"] is True
    assert (told["round"], told["rounds_contributed"], told["state"]) == (41, 40, "training")


def test_the_status_of_a_peer_that_died_says_so_and_how_to_go_on(run: Run, running_peer: Path) -> None:
    write_status(running_peer, read_status(running_peer), ProcessInfo(pid=1, created=0.0))
    result = run("status")
    assert result.exit_code == 1
    assert "gone: the peer that wrote this is gone (killed or crashed); its last sign was at " in result.stdout
    assert "in round 41 (training); start it again with the same --out to resume" in result.stdout
    told = run("status", "--json")
    assert told.exit_code == 1
    assert json.loads(told.stdout)["alive"] is False


@pytest.mark.parametrize("state", ["left", "done"])
def test_the_status_of_a_peer_that_ended_well_is_no_failure(run: Run, running_peer: Path, state: str) -> None:
    write_status(running_peer, replace(read_status(running_peer), state=state), ProcessInfo(pid=1, created=0.0))
    told = run("status", "--json")
    assert (told.exit_code, json.loads(told.stdout)["alive"]) == (0, False)


def test_pausing_a_loop_that_trains_on_says_so(run: Run, running_peer: Path) -> None:
    write_status(running_peer, replace(read_status(running_peer), trains_while_paused=True), ProcessInfo())
    assert run("pause").stdout == (
        "asked: the peer will contribute nothing until decentral resume; its own loop trains on meanwhile\n"
    )
    assert json.loads(run("pause", "--json").stdout)["trains_while_paused"] is True


def test_a_pause_for_some_time_says_when_it_ends(run: Run, running_peer: Path) -> None:
    assert run("pause", "--for", "2h").stdout.endswith("until decentral resume, or for 2.0 h\n")
    (asked,) = take_requests(running_peer)
    assert 7100 < asked.values["until"] - time.time() <= 7200


def test_leave_pause_and_resume_reach_the_peer(run: Run, running_peer: Path) -> None:
    for request in ("leave", "finish", "pause", "resume"):
        assert run(request).exit_code == 0
        assert take_requests(running_peer) == (Request(request),)


def test_waiting_for_a_peer_that_does_not_leave_ends(run: Run, running_peer: Path) -> None:
    result = run("leave", "--wait", "0.05")
    assert result.exit_code == 1
    assert "still training after 0.05 s" in result.stderr


def test_an_identity_travels_by_one_line(run: Run, tmp_path: Path) -> None:
    from decentral.swarm.identity import Identity

    made = Identity.load_or_create(tmp_path / "a/identity.key")
    (tmp_path / "key.txt").write_text(run("identity", "export", "--out", "a").stdout)
    assert run("identity", "import", "key.txt", "--out", "b").exit_code == 0
    assert run("identity", "show", "--out", "b").stdout.strip() == made.name
    assert json.loads(run("identity", "show", "--out", "b", "--json").stdout) == {"peer": made.name}
    again = run("identity", "import", "-", "--out", "b", input=made.export_text())
    assert again.exit_code == 10
    assert "there is an identity already" in again.stderr


def test_optimizers_and_compressors_are_listed_in_json_with_their_sources(run: Run) -> None:
    for command in ("optimizers", "compressors"):
        rows = json.loads(run(command, "--json").stdout)
        assert len(rows) >= 4
        assert all("arXiv" in row["source"] or "openreview.net" in row["source"] for row in rows)
