from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from decentral.cli import main
from decentral.observe.status import ProcessInfo, Status, write_status

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Type ``decentral ARGUMENTS`` in an empty directory."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object, **extra: object) -> Result:
        return CliRunner().invoke(main, [str(argument) for argument in arguments], **extra)  # type: ignore[arg-type]

    return run


@pytest.fixture
def running_peer(tmp_path: Path) -> Path:
    """The directory of a peer that runs: this very process."""
    folder = tmp_path / "decentral-run"
    folder.mkdir()
    status = Status(
        state="training",
        peer="12D3KooWabcdef",
        run="demo",
        algorithm="sparseloco",
        round=41,
        rounds=60,
        rounds_seen=41,
        rounds_contributed=40,
        bytes_per_round=200_000,
        next_sync_seconds=12.0,
        members=({"peer": "12D3KooWabcdef", "live": True, "round": 41}, {"peer": "12D3KooWother", "round": 41}),
        health="healthy: round 41, you contributed to 40 of the last 41, 0.2 MB sent per round, next sync in 12 s",
        invite="decentral1:abc",
    )
    write_status(folder, status, ProcessInfo())
    return folder
