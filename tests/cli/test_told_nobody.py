"""The admission token is for its owner alone: real peers, and every place in which other users of the machine look."""

from __future__ import annotations

import base64
import json
import os
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import zstandard

from decentral.observe.status import read_status
from decentral.swarm.invite import TOKEN_FILE, Invite
from decentral.wire.keys import Signer, peer_name
from tests.cli.conftest import Run
from tests.kit.families import LISTEN, write_terms
from tests.kit.patience import PATIENCE, pause, until

TOKEN = "a-token-that-nobody-else-may-read"
DECENTRAL = [sys.executable, "-m", "decentral"]
NET = (*LISTEN, "--no-lan")


# ---- where it could be read ----


def tells(data: bytes) -> bool:
    """Whether the token is in there: as it is, in hex, or anywhere in base64, as in an invite."""
    secret = TOKEN.encode()
    forms = {secret, secret.hex().encode()}
    for shift in range(3):
        text = base64.b64encode(bytes(shift) + secret)
        whole = text[(8 * shift + 5) // 6 : 8 * (shift + len(secret)) // 6]  # letters of the token alone
        forms |= {whole, whole.translate(bytes.maketrans(b"+/", b"-_"))}
    return any(form in data for form in forms)


def contents(path: Path) -> Iterator[bytes]:
    """What a file says, also a packed one."""
    data = path.read_bytes()
    yield data
    if path.suffix == ".zst":
        yield zstandard.ZstdDecompressor().decompressobj().decompress(data)
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as file:
            yield from map(file.read, file.namelist())


def telling_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and any(map(tells, contents(path)))]


def telling_files_of_others(folder: Path) -> list[Path]:
    """Those of them that other users may read."""
    return [path for path in telling_files(folder) if path.stat().st_mode & 0o077]


def telling_commands() -> list[str]:
    """Command lines of all that this process has started, and of what that has."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            words = process.cmdline()
            found += [" ".join(words)[:200]] if any(tells(word.encode()) for word in words) else []
    return found


# ---- peers ----


@contextmanager
def running(log: Path, arguments: list[str], **secrets: str) -> Iterator[subprocess.Popen[bytes]]:
    """``decentral ARGUMENTS`` as a service or nohup runs it: what it says goes to a file that others may read."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*DECENTRAL, *arguments], stdout=file, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1", **secrets}
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE)
        finally:
            process.kill()


@pytest.fixture
def terms(tmp_path: Path) -> list[str]:
    write_terms(tmp_path)
    return ["--data", str(tmp_path / "text"), *NET]


def until_untold(condition: Callable[[], bool]) -> None:
    """As soon as the condition holds; meanwhile no command line may tell the token."""

    def nothing_is_told() -> None:
        assert telling_commands() == []
        pause()

    until(condition, nothing_is_told)


def contributed(folder: Path) -> int:
    return read_status(folder).rounds_contributed if (folder / "status.json").exists() else 0


def can_be_joined(folder: Path) -> bool:
    return (folder / "status.json").exists() and read_status(folder).invite != ""


@pytest.mark.long
def test_nobody_else_reads_the_token_of_a_run(terms: list[str], tmp_path: Path, run: Run) -> None:
    before = os.umask(0o022)
    try:
        first, second = tmp_path / "runs/of/first", tmp_path / "second"
        start = ["start", str(tmp_path / "run.toml"), *terms, "--transport", "daemon", "--out", str(first)]
        with ExitStack() as stack:
            stack.enter_context(running(tmp_path / "first.log", start, DECENTRAL_ADMIT=TOKEN))
            until_untold(lambda: can_be_joined(first))
            line = shlex.split(run("invite", "--out", first).stdout)[2]
            assert Invite.parse(line).token == TOKEN, "to its owner the invite is shown whole"
            assert line not in run("status", "--out", first).stdout
            told = json.loads(run("status", "--out", first, "--json").stdout)["invite"]
            assert Invite.parse(told).token is None, "what asks how a peer is keeps logs"
            join = ["join", *terms, "--transport", "native", "--json", "--out", str(second)]
            stack.enter_context(running(tmp_path / "second.log", join, DECENTRAL_INVITE=line))
            until_untold(lambda: min(contributed(first), contributed(second)) >= 2)
            for folder in (first, second):
                result = run("support", "--no-doctor", "--out", folder, "--to", f"{folder.name}.zip")
                assert result.exit_code == 0, result.stderr
            assert telling_commands() == []
        assert telling_files_of_others(tmp_path) == []
        assert telling_files(tmp_path) == [folder / TOKEN_FILE for folder in (first, second)]
        assert "decentral join decentral1:" in (tmp_path / "first.log").read_text()
        assert "an open run" not in (tmp_path / "first.log").read_text()
        assert f"decentral invite --out {first}" in (tmp_path / "first.log").read_text()
        for folder in (first, second):
            for name in ("status.json", "events.jsonl", "metrics.jsonl"):
                assert (folder / name).stat().st_mode & 0o777 == 0o600
        made = [first, first.parent, first.parent.parent, second]
        made += [path for folder in (first, second) for path in folder.rglob("*") if path.is_dir()]
        assert {folder: folder.stat().st_mode & 0o777 for folder in made} == dict.fromkeys(made, 0o700)
    finally:
        os.umask(before)


@pytest.mark.long  # test_secrets.py has the command line of its follower
def test_nor_does_the_relay_tell_it_that_keeps_the_run(tmp_path: Path) -> None:
    """The follower of each run got its invite on the command line."""
    gone = f"/ip4/127.0.0.1/tcp/1/p2p/{peer_name(Signer.generate().peer)}"
    (tmp_path / "invite").write_text(str(Invite(bytes(32), (gone,), TOKEN)))
    (tmp_path / "invite").chmod(0o600)
    typed = ["relay", *NET[:2], "--identity", str(tmp_path / "relay.key"), "--keep", f"@{tmp_path / 'invite'}"]
    with running(tmp_path / "relay.log", [*typed, "--keep-in", str(tmp_path / "kept")]) as relay:

        def follows() -> bool:
            return any("follow" in child.cmdline() for child in psutil.Process(relay.pid).children(recursive=True))

        until_untold(lambda: relay.poll() is not None or follows())
        assert relay.poll() is None, (tmp_path / "relay.log").read_text()
        assert telling_commands() == []
    assert telling_files(tmp_path) == [tmp_path / "invite"]


# ---- the looks themselves ----


def test_a_token_that_is_planted_is_found(tmp_path: Path) -> None:
    for run in range(3):  # so that it begins at each place of a group of four letters
        addresses = (f"/ip4/127.0.0.1/tcp/1{'0' * run}",)
        assert tells(str(Invite(bytes(32), addresses, TOKEN)).encode())
        assert not tells(str(Invite(bytes(32), addresses)).encode())
    line = f"joined {Invite(bytes(32), (), TOKEN)}\n".encode()
    (tmp_path / "log").write_bytes(line)
    (tmp_path / "log.zst").write_bytes(zstandard.ZstdCompressor().compress(line))
    (tmp_path / "hex").write_text(TOKEN.encode().hex())
    (tmp_path / "other").write_text("nothing of it")
    with zipfile.ZipFile(tmp_path / "support.zip", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("status.json", line)
    (tmp_path / "kept").write_text(TOKEN)
    (tmp_path / "kept").chmod(0o600)
    found = {path.name for path in telling_files_of_others(tmp_path)}
    assert found == {"log", "log.zst", "hex", "support.zip"}
    assert {path.name for path in telling_files(tmp_path)} == {*found, "kept"}


@pytest.mark.parametrize("word", [TOKEN, f"--admit={TOKEN}", str(Invite(bytes(32), (), TOKEN))])
def test_a_token_on_a_command_line_is_found(word: str) -> None:
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()', sys.argv[1]])"
    child = subprocess.Popen([sys.executable, "-c", program, word], stdin=subprocess.PIPE)
    try:
        until(lambda: len(telling_commands()) >= 2)  # of the child, and of what that has started
    finally:
        child.communicate(b"\n")
    assert telling_commands() == []
