"""The transport benchmark with real transports, small: every figure is there and can be true."""

from __future__ import annotations

import json

import psutil
import pytest
from click.testing import CliRunner

from decentral.cli import main
from decentral.transport import pylibp2p
from decentral.transport.choice import kinds_here


@pytest.mark.long
@pytest.mark.parametrize("kind", kinds_here())
def test_a_stream_and_requests_are_timed_and_nothing_is_left_running(kind):
    result = CliRunner().invoke(
        main, ["bench", "transport", "--megabytes", "2", "--repeats", "2", "--only", kind, "--json"]
    )
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)
    assert found["transport"] == kind
    assert found["megabytes"] == pytest.approx(2 * 2**20 / 1e6, abs=1e-3)
    assert 1 < found["MBps"] < 1e5
    assert 0 < found["processor_ms_per_MB"] < 1e4
    assert 0 < found["request_ms"] <= found["request_ms_p90"] < 1e4
    left = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    assert not [line for line in left if "transport_peer" in line or "p2pd" in line]


@pytest.mark.long
def test_all_transports_of_this_system_take_turns():
    result = CliRunner().invoke(main, ["bench", "transport", "--megabytes", "1", "--repeats", "2", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [row["transport"] for row in found] == list(kinds_here())
    assert all(0 < row["processor_ms_per_MB"] < 1e4 for row in found)


def test_a_transport_whose_package_is_missing_is_left_out_and_refused_by_name(monkeypatch):
    others = tuple(kind for kind in kinds_here() if kind != "py-libp2p")
    monkeypatch.setattr(pylibp2p, "_PACKAGE", "no_such_package")
    assert kinds_here() == others
    result = CliRunner().invoke(main, ["bench", "transport", "--only", "py-libp2p"])
    assert result.exit_code == 2
    assert "pip install libp2p==0.8.1" in result.output


def test_the_lines_for_people_name_the_unit_of_each_figure():
    result = CliRunner().invoke(main, ["bench", "transport", "--megabytes", "1", "--repeats", "1", "--only", "native"])
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    assert line.startswith("native")
    assert "MB/s" in line
    assert "ms of processor a MB" in line
    assert "ms for a request of 1 kB" in line
