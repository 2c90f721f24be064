"""Words instead of an invite, as people use them: a relay, a first peer, ``invite --words``, and who was told them."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from decentral.cli.demo_processes import Family
from decentral.cli.invite import as_one_text
from decentral.manifest import preset_manifest
from decentral.observe.status import ProcessInfo, Status, read_status, write_status
from decentral.swarm.invite import Invite
from decentral.swarm.words import known_words
from tests.cli.conftest import Run
from tests.kit.families import LISTEN, NET
from tests.kit.patience import PATIENCE, until


def test_the_line_that_invites_asks_for_the_text_of_the_run(tmp_path: Path, run: Run) -> None:
    tables = {"model": {"task": "causal-lm"}, "data": {"corpus": "red foxes"}}
    (tmp_path / "run.toml").write_text(preset_manifest("sparseloco", **tables).to_toml())
    invite = str(Invite(bytes(32), ("/ip4/192.0.2.1/tcp/4001",), None))
    write_status(tmp_path, Status(state="training", invite=invite), ProcessInfo())
    line = run("invite", "--out", tmp_path).stdout
    assert shlex.split(line)[-2:] == ["--data", "PATH/TO/red foxes"]


@pytest.mark.long
def test_a_peer_joins_by_words_that_were_said_a_follower_too_and_a_wrong_word_is_refused(
    family: Family, terms: list[str], tmp_path: Path, run: Run
) -> None:
    typed = ["relay", *LISTEN, "--identity", str(tmp_path / "relay.key")]
    relay = family.start("relay", tmp_path / "relay", typed)
    _, host, _, port = relay.first_line(PATIENCE).split()[1].split("/")[1:5]
    out = tmp_path / "first"
    first = family.start("first", out, ["start", str(tmp_path / "run.toml"), *terms, "--out", str(out)])
    assert first.first_line(PATIENCE).startswith("decentral join decentral1:")
    asks = ["invite", "--words", "--no-lan", "--relay", f"{host}:{port}", "--out", str(out)]
    invites = family.start("invites", tmp_path / "invites", asks)
    said = shlex.split(invites.first_line(PATIENCE))
    assert said[:2] == ["decentral", "join"]
    assert said[3:] == ["--relay", f"{host}:{port}"]

    *words, number = said[2].split()
    other = next(word for word in known_words() if word not in words)
    third = tmp_path / "third"
    refused = run("join", *words[:3], other, number, *said[3:], *terms, "--out", third)
    assert refused.exit_code == 2
    assert f"not those of the one who invites at {number}" in refused.stderr.splitlines()[-1]
    assert not third.exists()

    out = tmp_path / "second"
    family.start("second", out, ["join", said[2], *said[3:], *terms, "--out", str(out)])
    assert invites.process.wait(PATIENCE) == 0
    assert "knew the words and has the invite" in (invites.directory / "stderr.txt").read_text()
    until(lambda: (out / "status.json").exists() and read_status(out).rounds_contributed >= 1)
    assert said[2] not in "".join(path.read_text() for path in out.glob("*.json*")), "no word is kept"

    again = family.start("again", tmp_path / "again", asks)
    words = shlex.split(again.first_line(PATIENCE))[2].split()
    followed = run("follow", *words, *said[3:], *NET, "--once", "--out", tmp_path / "follower")
    assert followed.exit_code == 0, followed.stderr
    assert list((tmp_path / "follower" / "anchors").glob("*.safetensors"))
    assert again.process.wait(PATIENCE) == 0


def test_words_need_no_quotes_and_a_scripts_arguments_stay_its_own() -> None:
    words = ["acid", "cargo", "mural", "tulip", "4711"]
    assert as_one_text(words[0], words[1:]) == (" ".join(words), ())
    assert as_one_text(words[0], [*words[1:], "--epochs", "3"]) == (" ".join(words), ("--epochs", "3"))
    assert as_one_text(words[0], [*words[1:-1], "47x"])[0].endswith(" 47x"), "a mistyped number is still one of words"
    assert as_one_text("decentral1:abc", ["a", "b", "c", "4"]) == ("decentral1:abc", ("a", "b", "c", "4"))
