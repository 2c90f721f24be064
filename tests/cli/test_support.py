"""The zip that goes along with a question: what helps is in it, what is secret or private is not."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from decentral.cli.support import Redaction
from decentral.node.folder import TOKEN_FILE
from decentral.observe.events import EventLog
from decentral.observe.status import ProcessInfo, read_status, write_status
from decentral.swarm.invite import Invite
from tests.cli.conftest import Run

SAID = "words of a private text"
TOKEN, INVITE = "a-token-of-this-run", str(Invite(bytes(32), ()))
ADDRESS = "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooWabc"


@pytest.fixture
def folder(running_peer: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory with everything in it that nobody else should see."""
    monkeypatch.setenv("HOME", str(running_peer.parent))
    (running_peer / TOKEN_FILE).write_text(f"{TOKEN}\n")
    (running_peer / "identity.key").write_bytes(b"the very secret key")
    (running_peer / "frozen.safetensors").write_bytes(b"weights")
    (running_peer / "error.txt").write_text(f"File {running_peer}/train.py, line 3: {TOKEN}")
    more = {"invite": INVITE, "addresses": (ADDRESS,), "sample": {"text": SAID, "prompt": SAID, "round": 3}}
    write_status(running_peer, replace(read_status(running_peer), **more), ProcessInfo())
    log = EventLog(running_peer)
    log("joined", address=ADDRESS, invite=INVITE)
    log("commit", round=7)
    log.close()
    return running_peer


def contents(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name).decode() for name in file.namelist()}


def test_what_helps_is_in_it_and_what_is_secret_is_not(run: Run, folder: Path) -> None:
    result = run("support")
    assert result.exit_code == 0, result.stderr
    found = contents(folder.parent / "decentral-support.zip")
    assert {"status.json", "events.jsonl", "metrics.jsonl", "folder.txt", "doctor.json", "error.txt"} <= set(found)
    assert json.loads(found["events.jsonl"].splitlines()[-1])["round"] == 7
    assert "identity.key" in found["folder.txt"], "that it is there helps"
    whole = "".join(found.values())
    for private in (TOKEN, INVITE, "203.0.113.7", "the very secret key", "weights", str(folder.parent)):
        assert private not in whole
    assert "~/decentral-run/train.py" in found["error.txt"]
    assert "/ip4/host1/tcp/4001/p2p/12D3KooWabc" in found["events.jsonl"]
    assert "/ip4/host1/tcp/4001/p2p/12D3KooWabc" in found["status.json"], "the same address is the same word"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("/dns4/relay.example.org/tcp/1", "/dns4/host1/tcp/1"),
        ("at 2001:db8::7 and 198.51.100.4", "at host1 and host2"),
        ("198.51.100.4, 198.51.100.4:80", "host1, host1:80"),
        ("127.0.0.1 ::1 0.0.0.0 stay", "127.0.0.1 ::1 0.0.0.0 stay"),
        ("version 2.13.0, at 12:30:45", "version 2.13.0, at 12:30:45"),
        ("/home/ann/run and /home/annabel", "~/run and /home/annabel"),
    ],
)
def test_addresses_become_words_and_what_looks_like_one_stays(text: str, told: str) -> None:
    assert Redaction([], "/home/ann")(text) == told
