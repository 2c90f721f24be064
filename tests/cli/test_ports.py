"""The port beside a peer: what Prometheus and a health check get from the folder that it runs in."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from decentral.cli.ports import health_of, metrics_beside
from decentral.errors import DiskError, ListenError
from decentral.observe.status import ProcessInfo, Status, write_status
from tests.kit.patience import PATIENCE


def get(address: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(address, timeout=PATIENCE) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_peer_answers_prometheus_and_a_health_check_while_it_runs(tmp_path: Path) -> None:
    said: list[str] = []
    with metrics_beside(tmp_path, ("127.0.0.1", 0), said.append):
        numbers = said[0].removeprefix("metrics at ")
        word = numbers.replace("/metrics", "/healthz")
        assert get(numbers) == (200, ""), "nothing is known yet"
        assert get(word)[0] == 503
        write_status(tmp_path, Status(state="training", round=41, health="healthy: round 41"), ProcessInfo())
        assert "\ndecentral_peer_round 41.0\n" in get(numbers)[1]
        assert '\ndecentral_peer_state{state="training"} 1.0\n' in get(numbers)[1]
        assert get(word) == (200, "healthy: round 41\n")
        write_status(tmp_path, Status(state="training", health="stalled: no round"), ProcessInfo())
        assert get(word) == (503, "stalled: no round\n")
    with pytest.raises(urllib.error.URLError):
        get(word)


def test_a_peer_that_was_killed_is_not_well_and_one_that_ended_is(tmp_path: Path) -> None:
    dead = ProcessInfo(pid=1, created=0.0)
    write_status(tmp_path, Status(state="training", health="healthy: round 41"), dead)
    well, line = health_of(tmp_path)
    assert (well, line[:6]) == (False, "gone: ")
    write_status(tmp_path, Status(state="done", health="done: 100 rounds"), dead)
    assert health_of(tmp_path) == (True, "done: 100 rounds")


def test_that_a_write_failed_is_told_before_the_process_ends(tmp_path: Path) -> None:
    """The port was closed before the last word was there: no alarm ever rang."""
    said, answers = list[str](), list[str]()
    asks = threading.Thread(target=lambda: answers.append(get(said[0].removeprefix("metrics at "))[1]))

    def say(text: str) -> None:
        said.append(text)
        if text.startswith("a write failed"):
            asks.start()

    with pytest.raises(DiskError), metrics_beside(tmp_path, ("127.0.0.1", 0), say):  # noqa: PT012
        write_status(tmp_path, Status(state="left", problem="it is full", write_failed=1), ProcessInfo())
        raise DiskError("it is full")
    asks.join(PATIENCE)
    assert "\ndecentral_peer_write_failed 1.0\n" in answers[0]


def test_a_disk_that_is_refused_at_the_start_is_said_at_once(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(DiskError), metrics_beside(tmp_path, ("127.0.0.1", 0), said.append):
        raise DiskError("it is read-only")
    assert len(said) == 1


def test_a_port_that_is_taken_is_said_and_nothing_is_left_open(tmp_path: Path) -> None:
    said: list[str] = []
    with metrics_beside(tmp_path, ("127.0.0.1", 0), said.append):
        port = int(said[0].split(":")[-1].split("/")[0])
        with (
            pytest.raises(ListenError, match=f"127.0.0.1:{port}: cannot listen"),
            metrics_beside(tmp_path, ("127.0.0.1", port), said.append),
        ):
            pass
    with metrics_beside(tmp_path, None, said.append):
        assert len(said) == 1, "without a port nothing listens"
