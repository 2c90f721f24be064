"""A run directory belongs to one run: whose it is, is written in its ``run.toml`` and in its checkpoints."""

from __future__ import annotations

from pathlib import Path

from decentral.consensus.chain import Head
from decentral.errors import DiskError, ManifestMismatch, UsageError
from decentral.manifest import Manifest, load_manifest
from decentral.state.checkpoint import load_metas
from decentral.state.durable import DISK, disk_errors

MANIFEST_FILE = "run.toml"
TOKEN_FILE = "admission.token"


def kept_terms(out: Path, run: bytes, whose: str = "these terms") -> Manifest | None:
    """The terms of run ``run`` that ``out`` keeps; None where there are none yet.

    ManifestMismatch when the folder is another run's: its peer could never come back.
    """
    for head in (Head.from_dict(meta["head"]) for meta in load_metas(out / "checkpoints") if "head" in meta):
        _check(out / "checkpoints", head.run, run, whose)
    path = out / MANIFEST_FILE
    if not path.exists():
        return None
    manifest = load_manifest(path)
    _check(path, manifest.digest, run, whose)
    return manifest


def keep_terms(out: Path, manifest: Manifest) -> None:
    """Write them to ``out`` unless they are there, perhaps in the words of whoever wrote them. Raises DiskError."""
    path = out / MANIFEST_FILE
    if not path.exists():
        with disk_errors(f"writing {path}"):
            DISK.replace_file(path, [manifest.to_toml().encode()])


def kept_token(out: Path, given: str | None) -> str | None:
    """The admission token of the run in ``out``, or the one ``given``. UsageError when there are two."""
    path = out / TOKEN_FILE
    try:
        kept = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return given
    except (OSError, ValueError) as error:
        raise DiskError(f"{path}: cannot be read ({error}); put it back, the invite has the same token") from error
    if given not in (None, kept):
        raise UsageError(f"{path} holds another admission token; leave it out, or ask for an invite of today")
    return kept


def keep_token(out: Path, token: str) -> None:
    """Write it to ``out``, for the restarts of this peer; others of this machine may not read it. Raises DiskError."""
    path = out / TOKEN_FILE
    if not path.exists():
        with disk_errors(f"writing {path}"):
            DISK.replace_file(path, [token.encode()])


def _check(path: Path, kept: bytes, run: bytes, whose: str) -> None:
    if kept != run:
        raise ManifestMismatch(
            f"{path} holds another run ({kept.hex()[:12]}), {whose} are of {run.hex()[:12]}; choose another --out"
        )
