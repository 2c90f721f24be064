import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOMS = ("compressors", "optimizers", "cli", "peer", "swarm", "tasks")
BUILD = "import sys; from hatchling import build; print(getattr(build, 'build_' + sys.argv[1])(sys.argv[2]))"


@pytest.fixture(scope="module")
def built(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel, built as ``pip`` would build them."""
    folder = tmp_path_factory.mktemp("dist")
    for kind in ("sdist", "wheel"):
        subprocess.run([sys.executable, "-c", BUILD, kind, str(folder)], cwd=root, check=True, capture_output=True)
    return folder


def test_the_wheel_holds_every_room_once_inside_the_package_and_the_page_with_the_licence_of_what_is_vendored(
    built: Path,
) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for room in ROOMS:
        assert f"decentral/{room}/__init__.py" in names
        assert not [name for name in names if name.startswith(f"{room}/")]
    shown = {name.removeprefix("decentral/dashboard/static/") for name in names if "/dashboard/static/" in name}
    assert {"index.html", "page.css", "main.js", "vendor/uPlot.iife.min.js", "vendor/LICENSE"} <= shown


def test_the_source_distribution_is_not_emptied_by_the_links_at_the_root(built: Path, root: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = {member.name.split("/", 1)[1]: member for member in archive if "/" in member.name}
    assert all(members[f"decentral/{room}/__init__.py"].isfile() for room in ROOMS)
    assert {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"} <= members.keys()
    for name in ("compressors", "optimizers", "cli"):
        assert (root / name).is_symlink()
        assert (root / name).resolve() == root / "decentral" / name


def test_the_wheel_says_that_it_is_typed_and_how_it_is_licensed(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    assert "decentral/py.typed" in archive.namelist()
    (metadata,) = [name for name in archive.namelist() if name.endswith("METADATA")]
    text = archive.read(metadata).decode()
    assert "License-Expression: Apache-2.0" in text
    assert "Requires-Python: >=3.11" in text


def test_the_licence_is_the_unaltered_apache_licence(root: Path) -> None:
    text = (root / "LICENSE").read_text(encoding="utf-8")
    assert text.lstrip().startswith("Apache License\n")
    assert "Version 2.0, January 2004" in text
    assert len(text.split()) == 1581


def test_the_pins_satisfy_the_ranges(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {name.lower(): version for name, _, version in (line.partition("==") for line in lines if "==" in line)}
    for text in project["dependencies"] + project["optional-dependencies"]["dev"]:
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate():
            assert wanted.specifier.contains(pins[wanted.name.lower()]), text
