"""What is installed: what the package imports and nothing more, and an extra only for whoever asked for it."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

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


def test_libp2p_comes_with_its_extra_only_and_is_tested_by_whoever_develops_on_linux():
    assert not any("libp2p" in one for one in PROJECT["dependencies"])
    extras = PROJECT["optional-dependencies"]
    assert extras["libp2p"] == ["libp2p==0.8.1"]  # parts of its inside are replaced: another version is another work
    assert not any("libp2p" in one for one in extras["dev"]), "make installs it where it can be built"


def test_the_page_comes_with_its_extra_and_is_tested_by_whoever_develops() -> None:
    extras = PROJECT["optional-dependencies"]
    assert not any(name in one for one in PROJECT["dependencies"] for name in ("starlette", "uvicorn"))
    assert set(extras["dashboard"]) <= set(extras["dev"])


def test_a_peer_that_trains_installs_no_library_for_figures() -> None:
    extras = PROJECT["optional-dependencies"]
    assert not any("matplotlib" in one for one in PROJECT["dependencies"])
    assert set(extras["figures"]) <= set(extras["dev"]) & set(extras["lab"])


def test_the_daemon_and_what_it_brings_come_with_an_extra_and_are_tested_by_whoever_develops() -> None:
    extras = PROJECT["optional-dependencies"]
    assert not any("hivemind" in one for one in PROJECT["dependencies"])
    assert set(extras["daemon"]) <= set(extras["dev"])


def test_a_peer_that_trains_installs_no_trio() -> None:
    extras = PROJECT["optional-dependencies"]
    assert not any("trio" in one for one in PROJECT["dependencies"])
    assert set(extras["simulate"]) <= set(extras["dev"])


def test_the_view_in_a_terminal_comes_with_its_extra_and_is_tested_by_whoever_develops() -> None:
    extras = PROJECT["optional-dependencies"]
    assert not any("textual" in one for one in PROJECT["dependencies"])
    assert set(extras["watch"]) <= set(extras["dev"])


def test_all_is_every_extra_but_those_for_who_develops() -> None:
    extras = PROJECT["optional-dependencies"]
    (everything,) = extras["all"]
    assert Requirement(everything).extras == set(extras) - {"all", "browser", "dev", "docs", "fuzz"}
