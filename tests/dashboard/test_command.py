"""``decentral dashboard``, and the page beside a peer."""

from __future__ import annotations

import http.client
import importlib.util
import re
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner

from decentral.cli import main
from decentral.cli.group import INTERRUPTED
from decentral.cli.ports import page_beside
from tests.kit.patience import PATIENCE
from tests.kit.site import Folder


def answer_of(address: str) -> int:
    found = re.search(r"127\.0\.0\.1:(\d+)", address)
    assert found is not None, address
    connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=PATIENCE)
    connection.request("GET", "/")
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status


@pytest.mark.parametrize("there", [pytest.param(True, marks=pytest.mark.long), False])
def test_the_command_prints_the_address_and_ends_by_ctrl_c(folder: Folder, there: bool) -> None:
    out = folder.path if there else folder.path / "later"
    command = [sys.executable, "-m", "decentral", "dashboard", "--out", str(out), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert answer_of(process.stdout.readline()) == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == INTERRUPTED
        said = process.stderr.read()
        assert said.startswith("the page is up, Ctrl-C ends it\n")
        assert there or f"it waits for a peer: {out}: no peer has run here; name the directory" in said


@pytest.mark.parametrize("command", [["dashboard"], ["start", "run.toml", "--dashboard"], ["join", "x", "--dashboard"]])
def test_without_the_extra_one_line_says_how_to_get_it(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else real(name))
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2
    assert result.stderr == "error: the page needs uvicorn; pip install 'starlette>=0.46' 'uvicorn>=0.34'\n"


def test_the_page_beside_a_peer_ends_with_it_and_a_second_one_takes_another_port(folder: Folder) -> None:
    said: list[str] = []
    with page_beside(folder.path, said.append, wanted=True), page_beside(folder.path, said.append, wanted=True):
        assert [answer_of(line) for line in said] == [200, 200]
    assert len(set(said)) == 2
    for line in said:
        with pytest.raises(ConnectionRefusedError):
            answer_of(line)


def test_without_the_option_nothing_listens(folder: Folder) -> None:
    said: list[str] = []
    with page_beside(folder.path, said.append, wanted=False):
        assert said == []


def test_the_page_brings_no_torch_along(folder: Folder) -> None:
    """A page of 40 MB beside a peer, not one of 400."""
    text = "import sys, decentral.dashboard.server; print('torch' in sys.modules, 'numpy' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert told.stdout == "False False\n"
