"""The key file: libp2p's own format, never readable by others, never replaced, never half written."""

import importlib.util
import os
import stat
import subprocess
from pathlib import Path

import pytest

from decentral.errors import ConfigError, DiskError
from decentral.swarm.identity import Identity
from decentral.wire.keys import Signer, verify


def test_a_new_identity_is_kept_and_loaded_again(tmp_path: Path) -> None:
    path = tmp_path / "run" / "identity.key"
    made = Identity.load_or_create(path)
    again = Identity.load_or_create(str(path))
    assert again.peer == made.peer
    assert made.name.startswith("12D3KooW")
    assert verify(again.peer, made.signer.sign(b"text"), b"text")
    assert os.listdir(path.parent) == ["identity.key"]
    # the protobuf that libp2p reads
    assert path.read_bytes() == bytes.fromhex("08011240") + made.signer.seed + made.peer
    # and nowhere does it show its secret
    assert made.signer.seed.hex() not in repr(made)
    assert made.name in repr(made)


def test_the_go_daemon_reads_the_same_file_and_has_the_same_name(tmp_path: Path) -> None:
    package = importlib.util.find_spec("hivemind")  # found, not imported: that takes seconds
    assert package is not None
    assert package.origin is not None
    daemon = Path(package.origin).parent / "hivemind_cli" / "p2pd"
    identity = Identity.load_or_create(tmp_path / "identity.key")
    command = [daemon, "-id", identity.path, "-listen", f"/unix{tmp_path}/socket", "-hostAddrs", "/ip4/127.0.0.1/tcp/0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        names = (line.split()[-1] for line in process.stdout if line.startswith("Peer ID:"))
        assert next(names) == identity.name
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_only_the_owner_may_read_the_key_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        path = Identity.load_or_create(tmp_path / "new" / "identity.key").path
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o601])
def test_a_key_that_others_may_read_is_refused_with_the_way_out(tmp_path: Path, mode: int) -> None:
    path = Identity.load_or_create(tmp_path / "identity.key").path
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:o}\\); run: chmod 600 {path}"):
        Identity.load_or_create(path)


def test_a_damaged_key_is_one_line_and_is_not_replaced(tmp_path: Path) -> None:
    path = Identity.load_or_create(tmp_path / "identity.key").path
    whole = path.read_bytes()
    flipped = [whole[:n] + bytes([whole[n] ^ 1]) + whole[n + 1 :] for n in range(len(whole))]
    foreign = [whole[:36] + Signer(bytes(32)).peer, b"-----BEGIN OPENSSH PRIVATE KEY-----".ljust(68)]
    for data in [b"", whole[:-1], whole + b"\0", *foreign, *flipped]:
        path.write_bytes(data)
        with pytest.raises(ConfigError, match="not an Ed25519 identity, or damaged") as caught:
            Identity.load_or_create(path)
        assert "\n" not in str(caught.value)
        assert path.read_bytes() == data


def test_an_exported_identity_is_imported_elsewhere(tmp_path: Path) -> None:
    identity = Identity.load_or_create(tmp_path / "a")
    text = identity.export_text()
    moved = Identity.import_text(f"  {text[:50]}\n{text[50:]}\n", tmp_path / "folder" / "b")
    assert moved.peer == identity.peer
    assert moved.path.read_bytes() == identity.path.read_bytes()
    assert stat.S_IMODE(moved.path.stat().st_mode) == 0o600


def test_an_import_never_replaces_a_key(tmp_path: Path) -> None:
    kept = Identity.load_or_create(tmp_path / "kept")
    text = Identity.load_or_create(tmp_path / "other").export_text()
    with pytest.raises(ConfigError, match="never replaced; move it away first"):
        Identity.import_text(text, kept.path)
    assert Identity.load(kept.path).peer == kept.peer
    assert sorted(os.listdir(tmp_path)) == ["kept", "other"]


def test_altered_or_foreign_text_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    text = Identity.load_or_create(tmp_path / "a").export_text()
    prefix = "decentral-key1:"
    for position in range(len(prefix), len(text)):
        other = "A" if text[position] != "A" else "B"
        with pytest.raises(ConfigError, match="identity text"):
            Identity.import_text(text[:position] + other + text[position + 1 :], tmp_path / "b")
    for foreign in ("", "hello", "é" * 20, prefix, text[:-4], text.removeprefix(prefix), "decentral1:" + text):
        with pytest.raises(ConfigError, match="copy the line that begins with decentral-key1: again"):
            Identity.import_text(foreign, tmp_path / "b")
    assert os.listdir(tmp_path) == ["a"]


def test_a_key_made_by_another_process_meanwhile_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "identity.key"
    other = Identity.load_or_create(tmp_path / "elsewhere")
    real = os.link

    def late(source: Path, target: Path) -> None:
        target.write_bytes(other.path.read_bytes())
        target.chmod(0o600)
        real(source, target)

    monkeypatch.setattr(os, "link", late)
    assert Identity.load_or_create(path).peer == other.peer
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "identity.key"]


@pytest.mark.parametrize("step", ["fsync", "link"])
def test_a_full_disk_leaves_no_half_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, step, full)
        with pytest.raises(DiskError, match="No space left on device"):
            Identity.load_or_create(tmp_path / "identity.key")
    assert os.listdir(tmp_path) == []
    Identity.load_or_create(tmp_path / "identity.key")


def test_places_where_no_key_can_be_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DiskError, match="not a folder"):
        Identity.load_or_create(tmp_path / "file" / "identity.key")
    with pytest.raises(ConfigError, match="not a file"):
        Identity.load_or_create(tmp_path)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="cannot be read"):
        Identity.load_or_create(tmp_path / "dangling")
    with pytest.raises(ConfigError, match="cannot be read"):
        Identity.load(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="not a file"):  # and at once
        Identity.load_or_create(tmp_path / "pipe")
