"""The transport benchmark with real transports, small: every figure is there and can be true."""

from __future__ import annotations

import json

import psutil
import pytest
from click.testing import CliRunner

from decentral.cli import main


@pytest.mark.parametrize("kind", ["daemon", "native"])
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


def test_the_lines_for_people_name_the_unit_of_each_figure():
    result = CliRunner().invoke(main, ["bench", "transport", "--megabytes", "1", "--repeats", "1", "--only", "native"])
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    assert line.startswith("native")
    assert "MB/s" in line
    assert "ms of processor a MB" in line
    assert "ms for a request of 1 kB" in line
