"""A run directory belongs to one run: whose it is, is written in its ``run.toml`` and in its checkpoints."""

from __future__ import annotations

from pathlib import Path

from decentral.errors import ManifestMismatch
from decentral.manifest import Manifest, load_manifest
from decentral.rounds.chain import Head
from decentral.state.checkpoint import load_metas
from decentral.state.durable import DISK, disk_errors

MANIFEST_FILE = "run.toml"


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


def _check(path: Path, kept: bytes, run: bytes, whose: str) -> None:
    if kept != run:
        raise ManifestMismatch(
            f"{path} is of run {kept.hex()[:12]}, {whose} are of {run.hex()[:12]}; choose another --out"
        )
