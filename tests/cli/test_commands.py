"""Help, lists and looks: what each command says of itself, and what those say that look at a peer or steer it."""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import click
import pytest

from decentral.cli import COMMANDS
from decentral.cli.options import HEADINGS
from decentral.observe.events import EventLog
from decentral.observe.health import health_sentence
from decentral.observe.requests import Request, take_requests
from decentral.observe.status import ProcessInfo, Status, read_status, write_status
from decentral.optimizers.slowmo import SlowMo
from decentral.swarm.identity import Identity
from tests.cli.conftest import Run, every_command

EVERY_COMMAND = dict(every_command())
DEAD = ProcessInfo(pid=1, created=0.0)
REPORTING = (
    *("status", "peers", "logs", "doctor", "optimizers", "aggregation", "compressors", "feedback"),
    *("bench compressors", "demo", "start", "join", "export", "follow", "lab"),
)


def test_every_command_has_help_with_an_example_of_itself_and_a_word_on_each_option(run: Run) -> None:
    for name, command in EVERY_COMMAND.items():
        result = run(*name.split(), "--help")
        assert result.exit_code == 0
        assert f"$ decentral {name}" in result.output
        for parameter in command.params:
            assert not isinstance(parameter, click.Option) or parameter.help, f"{name} {parameter.opts}"


def test_every_command_that_reports_can_do_so_in_json() -> None:
    for name in REPORTING:
        assert any("--json" in parameter.opts for parameter in EVERY_COMMAND[name].params), name


def test_help_shows_the_commands_by_what_they_are_for_also_where_none_is_typed(run: Run) -> None:
    shown = run("--help").output
    parts = [part.splitlines() for part in shown.split("\n\n")]
    headed = {lines[0]: [line.split()[0] for line in lines[1:]] for lines in parts if lines[0] in ("Run:", "Steer:")}
    assert headed["Run:"][:4] == ["demo", "init", "start", "join"]
    assert {"pause", "resume", "leave"} <= set(headed["Steer:"])
    assert all(f"\n  {name} " in shown for name in COMMANDS)
    nothing_typed = run()
    assert nothing_typed.exit_code == 2
    assert "Run:" in nothing_typed.stderr
    assert re.match(r"decentral \d+\.\d+", run("--version").output)


CHEAP_EXAMPLES = [
    ("init", []),
    ("optimizers", ["SparseLoCo", "arXiv:2508.15706"]),
    ("aggregation", ["norm_clip", "f=1 then=rfa", "arXiv:1912.13445"]),
    ("feedback", ["ef(beta=0.95)", "econtrol", "arXiv:2311.05645"]),
    ("compressors", ["topk"]),
    ("status", ["healthy: round 41, you contributed to 40 of the last 41, 0.2 MB sent per round"]),
    ("peers", ["12D3KooWother"]),
    ("logs", ["round 3: you alone"]),
    ("pause", ["asked: the peer will pause"]),
    ("resume", ["asked: the peer trains on"]),
]


@pytest.mark.parametrize(("name", "fragments"), CHEAP_EXAMPLES, ids=[name for name, _ in CHEAP_EXAMPLES])
def test_the_example_in_the_help_runs(run: Run, running_peer: Path, name: str, fragments: list[str]) -> None:
    log_commits(running_peer, 3)
    help_text = EVERY_COMMAND[name].help
    assert help_text is not None
    examples = re.findall(r"^ *\$ decentral (.*)$", help_text, re.MULTILINE)
    assert examples
    for example in examples:
        result = run(*example.split())
        assert result.exit_code == 0, result.stderr
        for fragment in fragments:
            assert fragment in result.stdout


def test_optimizers_and_compressors_are_listed_in_json_with_their_sources(run: Run) -> None:
    for command in ("optimizers", "compressors"):
        rows = json.loads(run(command, "--json").stdout)
        assert len(rows) >= 4
        assert all("arXiv" in row["source"] or "openreview.net" in row["source"] for row in rows)


def test_a_preset_that_was_not_better_than_a_peer_alone_is_told_of(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(run("init", "one.toml", "--preset", "slowmo").stdout.splitlines()) == 1
    monkeypatch.setattr(SlowMo, "preset", replace(SlowMo.preset, behind="slowmo was behind a peer alone."))
    assert run("init", "two.toml", "--preset", "slowmo").stdout.splitlines()[0] == "slowmo was behind a peer alone."


# ---- logs ----


def log_commits(directory: Path, *rounds: int) -> None:
    log = EventLog(directory)
    for number in rounds:
        log("commit", outer_step=number, contributors=["me"], members=["me"], contributed=True)
    log.close()


def test_logs_of_some_time_leave_out_what_was_before(run: Run, running_peer: Path) -> None:
    log = EventLog(running_peer, wall=iter((time.time() - 7200, *[time.time() - 60] * 30)).__next__)
    for number in range(31):
        log("round", number=number)
    log.close()
    assert re.findall(r"number=(\d+)", run("logs", "--since", "1h").stdout) == [str(n) for n in range(1, 31)]
    assert len(run("logs", "--since", "1h", "--last", "5").stdout.splitlines()) == 5
    assert "no event in that time" in run("logs", "--since", "1s").stderr


def test_what_a_loop_logs_every_step_does_not_push_out_what_happened(run: Run, running_peer: Path) -> None:
    log_commits(running_peer, 3)
    log = EventLog(running_peer)
    for step in range(30):
        log("metrics", inner_step=step, loss=1.0)
    log.close()
    assert re.findall(r"round 3|metrics", run("logs").stdout) == ["round 3"]
    assert len(run("logs", "--event", "metrics").stdout.splitlines()) == 20


def test_logs_name_a_peer_as_it_is_called_now(run: Run, tmp_path: Path) -> None:
    peer = f"12D3KooW{44 * 'a'}"
    log = EventLog(tmp_path)
    log("synced", peer=peer, round=3)
    log("sync_failed", peer=peer, why="\x1b[2J")
    log.close()
    for names, said in (({peer: "Anna"}, "Anna (aaaaaa)"), ({peer: "\x1b[2J"}, "…aaaaaa"), ({}, "…aaaaaa")):
        write_status(tmp_path, Status(state="done", names=names), ProcessInfo())
        lines = run("logs", "--out", str(tmp_path)).stdout.splitlines()
        assert lines[0].endswith(f"the model came from {said}")
        assert lines[1].endswith(f"{said} could not give its model: ?[2J")


# ---- the status ----

FIGURES = {"norm_dispersion": 0.9, "mean_cosine": 0.05, "debt_ratio": 3.0, "never_sent": 0.25}
NEWEST = {"diagnostics": FIGURES, "diagnosed_round": 41}
SHOWN = [  # a word that is not there at first, what the peer tells, and what is shown then
    (
        "limits",
        {"max_upload": 625_000.0, "uplink_bits": 4_900_000, "daily_upload": 50 * 10**9, "sent_today": 12 * 10**9},
        [
            "limits    5 Mbit/s up, 12.0 GB of 50.0 GB sent today (UTC)\n",
            "uplink    4.9 Mbit/s, from the transfers made\n",
        ],
    ),
    (
        "loss",
        {"loss": 2.5, "held_out_loss": 2.75, "seconds_left": 1800.0, "bytes_measuring": 1_048_578},
        [
            "loss      2.5000, held-out 2.7500, nats per token\n",
            "left      30 min, as it goes now\n",
            "besides   1.0 MB sent to peers that measured this line",
        ],
    ),
    (
        "says",
        {"sample": {"prompt": "The", "text": "The fox\n\x1b[2J", "round": 41}},
        ["says      The fox??[2J (after round 41, from “The” on)\n"],
    ),
    (
        "out of band",
        {**NEWEST, "diagnosed_part": True, "out_of_band": ("norm_dispersion",)},
        ["(round 41, of the part that this peer sums); out of band: norm_dispersion\n"],
    ),
    (
        "settings",
        {"preferences": {"max-compute": "70%"}, "kept_settings": ("max-compute", "max-upload")},
        ["settings  max-compute 70%; kept over restarts: max-compute, max-upload"],
    ),
]


@pytest.mark.parametrize(("word", "told", "lines"), SHOWN, ids=[word for word, _, _ in SHOWN])
def test_the_status_shows_what_a_peer_tells_of_itself_and_nothing_where_it_does_not(
    run: Run, running_peer: Path, word: str, told: dict[str, object], lines: list[str]
) -> None:
    assert word not in run("status").stdout
    write_status(running_peer, replace(read_status(running_peer), **told), ProcessInfo())  # type: ignore[arg-type]
    shown = run("status").stdout
    assert [line for line in lines if line not in shown] == []


def test_the_epoch_and_the_figures_of_a_round_are_shown_to_who_asks_for_more(run: Run, running_peer: Path) -> None:
    write_status(running_peer, replace(read_status(running_peer), **NEWEST), ProcessInfo())
    assert not {word for word in ("epoch", "updates") if word in run("status").stdout}
    shown = run("status", "-v").stdout
    assert "round 41 of 60, epoch 0\n" in shown
    assert (
        "updates   norms differ by 90%, mean cosine 0.050, owed 3 x a round's update, 25% never sent (round 41)\n"
        in shown
    )


def test_the_status_is_told_to_prometheus_or_in_json_with_every_field(run: Run, running_peer: Path) -> None:
    told = run("status", "--prometheus")
    assert told.exit_code == 0
    assert "decentral_peer_up 1.0\n" in told.stdout
    prefixes = ("# HELP decentral_peer_", "# TYPE decentral_peer_", "decentral_peer_")
    assert all(line.startswith(prefixes) for line in told.stdout.splitlines())
    fields = json.loads(run("status", "--json").stdout)
    assert fields["alive"] is True
    assert (fields["round"], fields["rounds_contributed"], fields["state"]) == (41, 40, "training")


def test_the_status_of_a_peer_that_died_says_so_and_how_to_go_on(run: Run, running_peer: Path) -> None:
    write_status(running_peer, read_status(running_peer), DEAD)
    result = run("status")
    assert result.exit_code == 1
    assert "gone: the peer that wrote this is gone (killed or crashed); its last sign was at " in result.stdout
    assert "in round 41 (training); start it again with the same --out to resume" in result.stdout
    told = run("status", "--json")
    assert told.exit_code == 1
    assert json.loads(told.stdout)["alive"] is False
    full = replace(read_status(running_peer), state="left", problem="writing x failed (No space left on device)")
    write_status(running_peer, replace(full, health=health_sentence(full)), DEAD)
    result = run("status")
    assert result.exit_code == 1
    assert result.stdout.startswith("stopped: writing x failed (No space left on device); start it again with")
    for state in ("left", "done"):  # who ended well is no failure
        write_status(running_peer, replace(read_status(running_peer), state=state, problem=""), DEAD)
        told = run("status", "--json")
        assert (told.exit_code, json.loads(told.stdout)["alive"]) == (0, False)


# ---- steering ----


def test_leave_pause_and_resume_reach_the_peer(run: Run, running_peer: Path) -> None:
    for request in ("leave", "finish", "pause", "resume"):
        assert run(request).exit_code == 0
        assert take_requests(running_peer) == (Request(request),)
    assert run("pause", "--for", "2h").stdout.endswith("until decentral resume, or for 2.0 h\n")
    (asked,) = take_requests(running_peer)
    assert 7000 < asked.values["until"] - time.time() <= 7200


def test_pausing_a_loop_that_trains_on_says_so(run: Run, running_peer: Path) -> None:
    write_status(running_peer, replace(read_status(running_peer), trains_while_paused=True), ProcessInfo())
    assert run("pause").stdout == (
        "asked: the peer will contribute nothing until decentral resume; its own loop trains on meanwhile\n"
    )
    assert json.loads(run("pause", "--json").stdout)["trains_while_paused"] is True


def test_waiting_for_a_peer_that_does_not_leave_ends(run: Run, running_peer: Path) -> None:
    result = run("leave", "--wait", "0.05")
    assert result.exit_code == 1
    assert "still training after 0.05 s" in result.stderr


def test_an_invite_of_a_running_peer_is_printed_as_a_line(run: Run, running_peer: Path) -> None:
    assert run("invite", "--out", running_peer).stdout == "decentral join decentral1:abc\n"
    assert (
        run("invite", "--out", running_peer, "--json").stdout
        == '{"invite": "decentral1:abc", "reaches": "not known"}\n'
    )


def test_a_terminal_of_80_columns_has_each_command_whole_on_its_line(run: Run) -> None:
    assert "..." not in run("--help", terminal_width=80).stdout.partition("Options:")[2]


@pytest.mark.parametrize("name", ["start", "join"])
def test_the_options_of_a_peer_stand_under_headings_each_once(run: Run, name: str) -> None:
    text = run(name, "--help").stdout
    headings = re.findall(r"^(\w[^:\n]*):$", text, re.MULTILINE)
    assert headings == ["Options", *HEADINGS]
    options = [option for option in EVERY_COMMAND[name].params if isinstance(option, click.Option)]
    assert [len(re.findall(rf"^  {option.opts[0]}\b", text, re.MULTILINE)) for option in options] == [1] * len(options)
    known = {option.name for command in ("start", "join") for option in EVERY_COMMAND[command].params}
    assert {one for names in HEADINGS.values() for one in names} <= known, "a heading for an option that there is not"


def test_a_key_that_is_redirected_to_a_file_is_its_owners_alone(tmp_path: Path) -> None:
    Identity.load_or_create(tmp_path / "identity.key")
    with (tmp_path / "my.key").open("w") as target:
        os.fchmod(target.fileno(), 0o644)
        typed = [sys.executable, "-m", "decentral", "identity", "export", "--out", str(tmp_path)]
        subprocess.run(typed, stdout=target, check=True)
    assert (tmp_path / "my.key").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "my.key").read_text().startswith("decentral-key1:")


def test_an_identity_travels_by_one_line(run: Run, tmp_path: Path) -> None:
    made = Identity.load_or_create(tmp_path / "a/identity.key")
    (tmp_path / "key.txt").write_text(run("identity", "export", "--out", "a").stdout)
    assert run("identity", "import", "key.txt", "--out", "b").exit_code == 0
    assert run("identity", "show", "--out", "b").stdout.strip() == made.name
    assert json.loads(run("identity", "show", "--out", "b", "--json").stdout) == {"peer": made.name}
    again = run("identity", "import", "-", "--out", "b", input=made.export_text())
    assert again.exit_code == 10
    assert "there is an identity already" in again.stderr
