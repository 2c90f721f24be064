"""The alarms as Prometheus itself judges them: who dies is told of, who has ended is not told of for ever."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

RULES = Path(__file__).parents[2] / "deploy/prometheus-alerts.yml"
PROMTOOL = shutil.which("promtool")
pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed: it comes with Prometheus")

ALIVE, DEAD = "1x2880", "1x60 0x2820"  # two days, a value a minute; it dies after an hour
GONE = "1x60 _x2820"  # its own numbers end with it


def series(name: str, labels: str, values: str) -> dict[str, str]:
    return {"series": f"{name}{{{labels}}}", "values": values}


def peer(instance: str, up: str, *, done: str = "0x2880") -> list[dict[str, str]]:
    """What Prometheus has of a peer: whether its port answers, and what it says of itself."""
    labels = f'job="decentral", instance="{instance}"'
    return [
        series("up", labels, up),
        series("decentral_peer_up", labels, GONE if up == DEAD else ALIVE),
        series("decentral_peer_state", f'{labels}, state="done"', done),
    ]


def disk(free: str, checkpoint: str | None) -> list[dict[str, str]]:
    """What is left on a peer's disk, and what its newest checkpoint takes."""
    labels = 'job="decentral", instance="a"'
    told = {"decentral_peer_disk_free_bytes": free, "decentral_peer_checkpoint_bytes": checkpoint}
    return [series(name, labels, f"{value}x2880") for name, value in told.items() if value is not None]


def failed(values: str) -> list[dict[str, str]]:
    """Whether a write ended it."""
    return [series("decentral_peer_write_failed", 'job="decentral", instance="a"', values)]


ENDED = peer("a", DEAD, done="0x59 1 _x2820")
ALARMS = ("DecentralPeerDown", "DecentralRelayDown", "DecentralDiskFills", "DecentralWriteFailed")
CASES = {
    "all are well": ([*peer("a", ALIVE), *peer("b", ALIVE)], "2h", []),
    "one of two dies": ([*peer("a", ALIVE), *peer("b", DEAD)], "70m", ["DecentralPeerDown"]),
    "its port does not answer for a minute": ([*peer("a", "1x60 0 1x2820")], "64m", []),
    "it has ended, and said so": (ENDED, "70m", []),
    "it ended unseen": (peer("a", DEAD), "70m", ["DecentralPeerDown"]),
    "it ended unseen two days ago": (peer("a", DEAD), "47h", []),
    "its disk fills": (disk("20e9", "3e9"), "30m", []),
    "its disk has no room for five checkpoints": (disk("14e9", "3e9"), "30m", ["DecentralDiskFills"]),
    "its disk is nearly full before any checkpoint": (disk("9e7", None), "30m", ["DecentralDiskFills"]),
    "a write failed and it ended": (failed("0x10 1 _x2820"), "70m", ["DecentralWriteFailed"]),
    "it was started again": (failed("0x10 1 _x20 0x2800"), "70m", []),
    "a relay dies": ([series("up", 'job="decentral-relay", instance="r"', DEAD)], "70m", ["DecentralRelayDown"]),
}


@pytest.mark.parametrize("case", CASES)
def test_an_alarm_is_given_where_it_should_be_and_not_where_it_should_not(case: str, tmp_path: Path) -> None:
    inputs, at, names = CASES[case]
    told = [expected(name, at, names) for name in ALARMS]
    asked = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": inputs, "promql_expr_test": told}],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump(asked))
    done = subprocess.run([str(PROMTOOL), "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def expected(name: str, at: str, names: list[str]) -> dict[str, Any]:
    """How often an alarm rings at a moment."""
    rings = f'count(ALERTS{{alertname="{name}", alertstate="firing"}}) or vector(0)'
    return {"expr": rings, "eval_time": at, "exp_samples": [{"labels": "{}", "value": int(name in names)}]}


def test_the_rules_are_read_by_prometheus() -> None:
    subprocess.run([str(PROMTOOL), "check", "rules", str(RULES)], check=True, capture_output=True)
