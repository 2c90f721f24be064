"""This peer's key on disk: an Ed25519 private key as libp2p writes it, so the go-libp2p daemon reads the same file.

File layout: 08 01 12 40, then the 32 secret bytes, then the 32 public ones (68 bytes). Nothing of it crosses the wire.

Source: the libp2p peer id specification, "Keys", private key protobuf (type Ed25519 = 1, 64 bytes of data).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import secrets
import shlex
import stat
from dataclasses import dataclass
from pathlib import Path

from decentral.errors import ConfigError, DiskError, UsageError
from decentral.wire.keys import SEED_NBYTES, PeerId, Signer, peer_name

_PREFIX = bytes.fromhex("08011240")
_FILE_NBYTES = len(_PREFIX) + 2 * SEED_NBYTES
_TEXT_PREFIX = "decentral-key1:"
_CHECKSUM_NBYTES = 4


@dataclass(frozen=True, slots=True)
class Identity:
    """A key file and its signer."""

    path: Path
    signer: Signer

    @property
    def peer(self) -> PeerId:
        """The public key: who this peer is."""
        return self.signer.peer

    @property
    def name(self) -> str:
        """The libp2p id, ``12D3KooW...``."""
        return peer_name(self.peer)

    @classmethod
    def load_or_create(cls, path: str | Path) -> Identity:
        """The identity in ``path``, made there first when there is none.

        Raises ConfigError for a file that others may read or that is no key, DiskError when it cannot be written.
        """
        path = Path(path)
        if not os.path.lexists(path):  # False also where it may not be looked for: creating it then says why
            with contextlib.suppress(FileExistsError):  # another process of this peer was faster: load its key
                _create(path, Signer.generate())
        return cls.load(path)

    @classmethod
    def load(cls, path: str | Path) -> Identity:
        """The identity in ``path``. Raises ConfigError."""
        path = Path(path)
        return cls(path, _signer(_read(path), str(path)))

    @classmethod
    def import_text(cls, text: str, path: str | Path) -> Identity:
        """Write the identity that ``export_text`` gave to ``path``, which must not exist yet. Raises ConfigError."""
        path, signer = Path(path), _from_text(text)
        try:
            if os.path.lexists(path):  # before anything is written beside it
                raise FileExistsError(path)
            _create(path, signer)
        except FileExistsError:
            raise ConfigError(f"{path}: there is an identity already, never replaced; move it away first") from None
        return cls(path, signer)

    def export_text(self) -> str:
        """The secret key as one line, for a backup or another machine. Whoever reads it can be this peer."""
        data = _to_bytes(self.signer)
        return _TEXT_PREFIX + base64.urlsafe_b64encode(data + _checksum(data)).decode("ascii")


def _to_bytes(signer: Signer) -> bytes:
    return _PREFIX + signer.seed + signer.peer


def _signer(data: bytes, source: str) -> Signer:
    seed = data[len(_PREFIX) : len(_PREFIX) + SEED_NBYTES]
    if len(data) == _FILE_NBYTES and data.startswith(_PREFIX):
        signer = Signer(seed)
        if _to_bytes(signer) == data:
            return signer
    raise ConfigError(f"{source}: not an Ed25519 identity, or damaged; restore it from a backup, or move it away")


def _from_text(text: str) -> Signer:
    text = "".join(text.split())
    try:
        raw = base64.b64decode(text.removeprefix(_TEXT_PREFIX).encode("ascii"), altchars=b"-_", validate=True)
    except ValueError:
        raw = b""
    data, checksum = raw[:-_CHECKSUM_NBYTES], raw[-_CHECKSUM_NBYTES:]
    if not text.startswith(_TEXT_PREFIX) or checksum != _checksum(data):
        raise UsageError(f"identity text: not whole, or altered; copy the line that begins with {_TEXT_PREFIX} again")
    return _signer(data, "identity text")


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_CHECKSUM_NBYTES).digest()


def _read(path: Path) -> bytes:
    """The file's bytes, once it is known that nobody else may read them. One open: no race with a swapped file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); name another identity file") from error
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{path}: not a file; name another identity file")
        data = os.read(descriptor, _FILE_NBYTES + 1)
        if os.name == "posix" and mode & 0o077 and data.startswith(_PREFIX):  # what is no key is told as that
            mend = f"chmod 600 {shlex.quote(str(path))}"
            raise ConfigError(f"{path}: others may read this key (mode {stat.S_IMODE(mode):o}); run: {mend}")
        return data
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); name another identity file") from error
    finally:
        os.close(descriptor)


def _create(path: Path, signer: Signer) -> None:
    """Write the key to a new file, whole or not at all, readable by its owner only from its first byte on.

    A temporary file is linked to its name: unlike a rename, a link never replaces what is there.
    Raises FileExistsError when ``path`` exists, DiskError when it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        _make_folder(path.parent)
        try:
            _write(temporary, _to_bytes(signer))
            os.link(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(path.parent)
    except FileExistsError:
        raise
    except OSError as error:
        raise DiskError(f"{path}: identity cannot be written ({error.strerror}); choose another folder") from error


def _make_folder(folder: Path) -> None:
    """With its parents where missing, for their owner alone: ``parents=True`` would leave those to the umask."""
    try:
        if not folder.parent.exists():
            _make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError as error:  # by its own class it would read as "the key exists"
        raise DiskError(f"{folder}: not a folder; choose another folder for the identity") from error


def _write(path: Path, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make the new name itself durable, where the system lets a folder be opened."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
