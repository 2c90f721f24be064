"""From the options of ``init`` to a manifest on disk."""

import re
from collections.abc import Mapping
from pathlib import Path

from decentral.cli.files import write_text
from decentral.errors import UsageError
from decentral.manifest import Manifest, check_methods, preset_manifest

# option of init -> table and key of the manifest
KEYS = {
    "name": ("run", "name"),
    "seed": ("run", "seed"),
    "rounds": ("run", "rounds"),
    "minutes": ("run", "minutes"),
    "corpus": ("data", "corpus"),
    "digest": ("data", "digest"),
    "inner_steps": ("inner", "steps"),
    "overlap": ("outer", "overlap"),
    "compressor": ("compressor", "chain"),
    "min_peers": ("swarm", "min_peers"),
}


def with_text(overrides: Mapping[str, object], data: Path) -> dict[str, object]:
    """The overrides with the corpus at ``data``: its digest, and its name where no label is given. Raises DataError."""
    from decentral.tasks.survey import survey

    label = overrides.get("corpus") or re.sub(r"[^A-Za-z0-9 ._-]+", "-", data.resolve().name)[:128].lstrip(" ._-")
    if label == "stdlib":
        raise UsageError("--corpus stdlib means the standard library; give the text at --data another label")
    return {**overrides, "corpus": label or "text", "digest": survey(data).digest}


def write_terms(file: Path, preset: str, overrides: Mapping[str, object]) -> Manifest:
    """Write the preset's manifest with these keys changed. Raises ConfigError, DiskError."""
    tables: dict[str, dict[str, object]] = {}
    for option, value in overrides.items():
        if value is not None:
            table, key = KEYS[option]
            tables.setdefault(table, {})[key] = value
    manifest = preset_manifest(preset, **tables)
    check_methods(manifest)
    write_text(file, manifest.to_toml())
    return manifest
