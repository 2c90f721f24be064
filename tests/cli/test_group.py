"""tests/cli/test_group.py"""

import errno
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from decentral import errors
from decentral.cli.group import TRACEBACK_FILE, describe_failure, report_failure, stop_signals
from decentral.manifest import preset_manifest


class OutOfMemoryError(RuntimeError):
    """Named as torch names it."""


EXIT_CODES = {
    "ConfigError": 10,
    "UsageError": 2,
    "FolderInUse": 2,
    "InviteError": 2,
    "ManifestMismatch": 11,
    "NotAdmitted": 12,
    "NoPeersError": 20,
    "VersionError": 21,
    "DataError": 30,
    "DeviceError": 40,
    "NonFiniteError": 40,
    "DiskError": 50,
    "PayloadError": 1,
    "TransportError": 1,
    "ListenError": 1,
    "PeerUnreachable": 1,
    "StreamClosed": 1,
    "BaseMismatch": 1,
    "ProcessLost": 60,
    "RoundFailed": 1,
    "DecentralError": 1,
}


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_of_ours_is_its_message_and_its_exit_code(name: str) -> None:
    error = getattr(errors, name)("what happened;\n  do this")
    assert describe_failure(error) == ("what happened; do this", EXIT_CODES[name])


@pytest.mark.parametrize(
    ("error", "line", "code"),
    [
        (KeyboardInterrupt(), "interrupted", 130),
        (click.Abort(), "interrupted", 130),
        (MemoryError(), "out of memory; use a smaller batch", 40),
        (OutOfMemoryError("CUDA out of memory"), "out of memory; use a smaller batch", 40),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out of memory; use a smaller", 40),
        (RuntimeError("MPS backend out of memory"), "out of memory; use a smaller batch", 40),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of memory; use a smaller batch", 40),
        (OSError(errno.ENOSPC, "No space", "a/b"), "a/b: the disk is full; free some space", 50),
        (OSError(errno.EROFS, "Read-only", "a/b"), "a/b: the file system is read-only", 50),
        (PermissionError(errno.EACCES, "denied", "a/b"), "a/b: no permission; choose a place you may write to", 50),
        (click.UsageError("Bad thing."), "bad thing; see decentral --help", 2),
        (ExceptionGroup("group", [errors.DataError("no text")]), "no text", 30),
        (ValueError("odd\nthing"), "unexpected ValueError: odd thing", 1),
    ],
)
def test_every_other_exception_is_one_line_too(error: BaseException, line: str, code: int) -> None:
    found, exit_code = describe_failure(error)
    assert found.startswith(line)
    assert "\n" not in found
    assert exit_code == code


def test_where_an_unexpected_error_came_from_is_written_to_the_run_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="odd") as raised:
        raise ValueError("odd")
    assert report_failure(raised.value, directory=tmp_path, traceback=False) == 1
    assert "test_group.py" in (tmp_path / TRACEBACK_FILE).read_text()
    assert capsys.readouterr().err == (
        f"error: unexpected ValueError: odd; its origin is in {tmp_path / TRACEBACK_FILE}\n"
    )
    assert report_failure(ValueError("odd"), directory=None, traceback=False) == 1
    assert "run decentral --traceback" in capsys.readouterr().err


def test_the_origin_is_shown_when_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report_failure(errors.DataError("no text"), directory=tmp_path, traceback=True) == 30
    shown = capsys.readouterr().err
    assert "DataError" in shown
    assert shown.endswith("error: no text\n")
    assert not (tmp_path / TRACEBACK_FILE).exists()


@pytest.mark.parametrize(("ends_with", "code"), [(None, 0), (0, 0), (7, 7), ("no text here", 1)])
def test_who_ends_with_words_instead_of_a_number_has_failed_and_they_are_shown(
    capsys: pytest.CaptureFixture[str], ends_with: int | str | None, code: int
) -> None:
    assert report_failure(SystemExit(ends_with), directory=None, traceback=False) == code
    assert capsys.readouterr().err == (f"{ends_with}\n" if code == 1 else "")


def test_a_full_disk_under_stderr_takes_the_line_and_leaves_the_exit_code(monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(click, "echo", full)
    assert report_failure(errors.DiskError("full"), directory=None, traceback=False) == 50


TOO_LARGE = """
import resource, sys
# torch and all that: what is limited is the model
import decentral.cli.training_context, decentral.cli.train, psutil
room = psutil.Process().memory_info().vms + 300 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (room, room))
from decentral.cli import main
main(["start", "run.toml", "--solo", "--out", "run"])
"""


@pytest.mark.long
def test_a_model_that_does_not_fit_the_machines_memory_is_exit_code_40(tmp_path: Path) -> None:
    manifest = preset_manifest("diloco", model={"hidden": 8192, "layers": 4, "heads": 4, "context": 16})
    (tmp_path / "run.toml").write_text(manifest.to_toml())
    done = subprocess.run([sys.executable, "-c", TOO_LARGE], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 40, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: out of memory; use a smaller batch or context")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_asks_gently_and_is_remembered_as_its_exit_code_and_the_second_ends_at_once(
    number: signal.Signals, code: int
) -> None:
    asked = []
    with stop_signals() as stop:
        stop.gently(lambda: asked.append(number))
        signal.raise_signal(number)
        assert (asked, stop.code) == ([number], code)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGHUP there")
def test_a_terminal_that_closes_says_so_more_than_once() -> None:
    asked = []
    with stop_signals() as stop:
        stop.gently(lambda: asked.append(1))
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
    assert (asked, stop.code) == ([1], 129)


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGHUP there")
def test_nohup_stays_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals() as stop:
            stop.gently(lambda: pytest.fail("heard"))
            signal.raise_signal(signal.SIGHUP)
        assert stop.code is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_before_anything_can_be_left_gently_a_signal_ends_at_once() -> None:
    with stop_signals(), pytest.raises(SystemExit) as ended:
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 143


def test_the_handlers_are_as_before_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with stop_signals():
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
