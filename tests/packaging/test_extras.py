"""What the package imports is installed and nothing more; an extra only for who asked; the job for other systems."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def imported() -> Iterator[str]:
    """The first word of every import of the package."""
    for path in (ROOT / "decentral").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                yield (node.module or "").partition(".")[0]


def test_every_dependency_is_imported() -> None:
    found = set(imported())
    assert not [name for name in (Requirement(one).name for one in PROJECT["dependencies"]) if name not in found]


BESIDE = [  # an extra, packages that come with it alone, and other extras that bring it
    ("dashboard", ("starlette", "uvicorn"), ("dev",)),
    ("figures", ("matplotlib",), ("dev", "lab")),
    ("daemon", ("hivemind",), ("dev",)),
    ("simulate", ("trio",), ("dev",)),
    ("transformers", ("transformers", "tokenizers"), ("dev",)),
    ("watch", ("textual",), ("dev",)),
]


@pytest.mark.parametrize(("extra", "packages", "others"), BESIDE, ids=[extra for extra, _, _ in BESIDE])
def test_a_peer_that_trains_installs_nothing_for_what_stands_beside_it_and_who_develops_all(
    extra: str, packages: tuple[str, ...], others: tuple[str, ...]
) -> None:
    extras = PROJECT["optional-dependencies"]
    assert not any(name in one for one in PROJECT["dependencies"] for name in packages)
    assert all(set(extras[extra]) <= set(extras[other]) for other in others)


def test_libp2p_comes_with_its_extra_only_and_is_installed_where_it_can_be_built() -> None:
    assert not any("libp2p" in one for one in PROJECT["dependencies"])
    extras = PROJECT["optional-dependencies"]
    assert extras["libp2p"] == ["libp2p==0.8.1"]  # parts of its inside are replaced: another version is another work
    assert not any("libp2p" in one for one in extras["dev"])


def test_all_is_every_extra_but_those_for_who_develops() -> None:
    extras = PROJECT["optional-dependencies"]
    (everything,) = extras["all"]
    assert Requirement(everything).extras == set(extras) - {"all", "browser", "dev", "docs", "fuzz"}


def test_the_job_for_other_systems_runs_tests_that_exist():
    job = (ROOT / ".github/workflows/platforms.yml").read_text()
    named = re.findall(r"\btests/[\w./]+", job)
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []
    assert {"windows-latest", "macos-latest"} <= set(re.findall(r"[\w-]+-latest", job))
