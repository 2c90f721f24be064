"""The package of examples/own_package, laid where pip would leave it."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "examples/own_package"


def install(folder: Path) -> None:
    """Its module, and the metadata that pip would make of its pyproject.toml."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    shutil.copy(PACKAGE / "own_methods.py", folder)
    metadata = folder / f"own_methods-{project['version']}.dist-info"
    metadata.mkdir()
    named = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (metadata / "METADATA").write_text(named, encoding="utf-8")
    groups = project["entry-points"].items()
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items()) for group, points in groups
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
