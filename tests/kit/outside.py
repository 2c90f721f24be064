"""An example of the docs as somebody else's package: written where pip would leave it, found by its entry points."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def examples(page: Path) -> list[str]:
    """The code of a page, section by section; together it is one module."""
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def entry_points(page: Path) -> dict[str, dict[str, str]]:
    """What a page declares, of all its sections: {group: {name: object}}."""
    groups: dict[str, dict[str, str]] = {}
    text = page.read_text(encoding="utf-8")
    for declared in re.findall(r"```toml\n(\[project\.entry-points.*?)```", text, flags=re.DOTALL):
        for group, points in tomllib.loads(declared)["project"]["entry-points"].items():
            groups.setdefault(group, {}).update(points)
    return groups


def install(page: Path, folder: Path) -> None:
    """Write the page's package ``my_package`` into a folder, with the metadata that pip would write."""
    (folder / "my_package.py").write_text("\n\n".join(examples(page)), encoding="utf-8")
    metadata = folder / "my_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    lines = [
        f"[{group}]\n" + "".join(f"{n} = {v}\n" for n, v in points.items())
        for group, points in entry_points(page).items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines))


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What a Python that has the package says, outside of the repository."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)


def laws(folder: Path, *chosen: str) -> int:
    """How many laws pass over those that options choose; AssertionError with what pytest said unless it is all."""
    done = python(folder, "-m", "pytest", str(ROOT / "tests/laws"), "-q", "-p", "no:cacheprovider", *chosen)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    return int(passed)
