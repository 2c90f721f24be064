"""The baseline's loop, on a model so small that a run takes a second: the very loop that also trains in a swarm."""

import io
import json
import shutil
import signal
import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from decentral.cli.group import Stop
from decentral.cli.options import JobOptions
from decentral.cli.train import train_alone, train_with_swarm
from decentral.manifest import Manifest
from decentral.observe.metrics import read_metrics
from decentral.observe.requests import ask
from decentral.observe.screen import PlainDisplay
from decentral.observe.status import Status, read_status
from decentral.peer.settings import JoinOptions
from tests.cli.conftest import Run, small
from tests.kit.patience import PATIENCE, until


def train(manifest: Manifest, out: Path, text: Path, stop: Stop | None = None) -> dict[str, Any]:
    display = PlainDisplay(io.StringIO(), stop="Ctrl-C")
    return train_alone(manifest, JobOptions(out=out, data=text), display, stop or Stop())


def test_the_baseline_trains_for_as_many_steps_as_the_run_has_and_learns(tmp_path: Path, text: Path) -> None:
    summary = train(small(), tmp_path / "out", text)
    assert summary == json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["inner_steps"] == 60
    assert summary["tokens"] == 60 * 2 * 16
    assert summary["bits_per_byte"] < 6.0
    assert 0 < summary["utilisation"] <= 1
    outer = list(read_metrics(tmp_path / "out", "outer"))
    assert [row["round"] for row in outer] == [1, 2, 3, 4, 5, 6, 6]  # the last one again, evaluated in any case
    assert outer[-1]["bits_per_byte"] == summary["bits_per_byte"], "the figure ends where the table does"
    assert outer[0]["bits_per_byte"] > summary["bits_per_byte"]
    assert read_status(tmp_path / "out").state == "done"


def test_with_fragments_a_round_is_a_part_of_the_inner_steps(tmp_path: Path, text: Path) -> None:
    manifest = small(outer={"fragments": 2, "method": "sparseloco"})
    assert train(manifest, tmp_path / "out", text)["inner_steps"] == 30


def test_the_same_seed_gives_the_same_losses(tmp_path: Path, text: Path) -> None:
    losses = []
    for name in ("a", "b"):
        train(small(), tmp_path / name, text)
        losses.append([row["loss"] for row in read_metrics(tmp_path / name, "inner")])
    assert losses[0] == losses[1]


def test_what_the_model_says_changes_no_bit_of_training(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs of one peer, of one key and one seed: their data, and so their models, are the same."""
    terms, display, digests = small(), PlainDisplay(io.StringIO(), stop="Ctrl-C"), []
    network: JoinOptions = {"alone": True, "transport": "native", "listen": ("/ip4/127.0.0.1/tcp/0",), "lan": False}
    for name, share in (("with", 1.0), ("without", -1.0)):
        out = tmp_path / name
        out.mkdir()
        if digests:
            shutil.copy(tmp_path / "with/identity.key", out)
        monkeypatch.setattr("decentral.cli.training_context.SAMPLE_SHARE", share)
        options = JobOptions(out=out, data=text, join=network)
        digests.append(train_with_swarm(terms, options, display, Stop(), lambda invite: None)["anchor_digest"])
        said = read_status(out).sample
        assert (said["round"], said["prompt"]) == (6, "The") if share > 0 else not said
    assert digests[0] == digests[1]


def test_a_signal_ends_training_at_a_step_without_a_last_evaluation(tmp_path: Path, text: Path) -> None:
    class StopsAtOnce(Stop):
        def gently(self, on_first: Callable[[], None] | None) -> None:
            super().gently(on_first)
            if on_first is not None:
                self(signal.SIGINT, None)

    stop = StopsAtOnce()
    summary = train(small(), tmp_path / "out", text, stop)
    assert summary["inner_steps"] == 0
    assert "loss" not in summary
    assert stop.code == 130


def test_the_command_prints_its_summary_as_json_only_on_stdout(run: Run, tmp_path: Path, text: Path) -> None:
    (tmp_path / "run.toml").write_text(small(run={"rounds": 1}).to_toml())
    result = run("start", "run.toml", "--solo", "--data", text, "--out", "out", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["solo"] is True
    assert "to stop: Ctrl-C, or decentral leave --out out" in result.stderr
    assert (tmp_path / "out/run.toml").exists()


@pytest.mark.long
def test_a_baseline_can_be_paused_goes_on_and_tells_its_losses(tmp_path: Path, text: Path) -> None:
    out, trained = tmp_path / "out", threading.Thread(target=lambda: train(small(run={"rounds": 10**6}), out, text))
    trained.start()

    def status_once(condition: Callable[[Status], bool]) -> Status:
        until(lambda: (out / "status.json").exists() and condition(read_status(out)))
        return read_status(out)

    status_once(lambda status: status.loss is not None and status.held_out_loss is not None)
    ask(out, "pause")
    paused = status_once(lambda status: status.state == "paused")
    again = status_once(lambda status: status.updated > paused.updated + 1.0)
    assert again.inner_steps <= paused.inner_steps + 1
    ask(out, "resume")
    status_once(lambda status: status.state == "training" and status.inner_steps > again.inner_steps)
    in_ten_hours = datetime.now() + timedelta(hours=10)
    hours = f"{in_ten_hours:%H:%M}-{in_ten_hours + timedelta(hours=1):%H:%M}"
    ask(out, "set", key="schedule", value=hours)
    closed = status_once(lambda status: status.state == "paused")
    assert closed.preferences == {"schedule": hours}
    assert f"outside its hours until {in_ten_hours:%H:%M}; " in closed.health
    assert closed.health.endswith("it goes on by itself")
    ask(out, "set", key="schedule", value="always")
    status_once(lambda status: status.state == "training" and status.inner_steps > closed.inner_steps)
    ask(out, "leave")
    trained.join(PATIENCE)
    assert read_status(out).state == "left"


@pytest.mark.parametrize("name", ["muon", "schedule_free", "gpa"])
def test_the_baseline_trains_by_the_optimizer_that_the_manifest_names(tmp_path: Path, text: Path, name: str) -> None:
    """Evaluated is what it learns, which of GPA and Schedule-Free is an average and not what it trains at."""
    inner = {"steps": 10, "learning_rate": 1e-2, "warmup": 2, "optimizer": name}
    summary = train(small(inner=inner), tmp_path / "out", text)
    assert summary["inner_steps"] == 60
    outer = list(read_metrics(tmp_path / "out", "outer"))
    assert summary["bits_per_byte"] < outer[0]["bits_per_byte"] - 0.01
    assert 0 < summary["utilisation"] <= 1
