"""docs/architecture.md against the contract that import-linter checks, and against what the folders import."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")


def contract() -> list[set[str]]:
    """The layers of pyproject.toml, the highest first."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (layers,) = [one["layers"] for one in settings["tool"]["importlinter"]["contracts"] if one["type"] == "layers"]
    return [set(re.findall(r"decentral\.(\w+)", layer)) for layer in layers]


def listed() -> list[set[str]]:
    """The first column of the page's table, row by row."""
    table = PAGE.split("## Which folder may know what")[1].split("\n## ")[0]
    return [set(re.findall(r"`(\w+)`", cell)) for cell in re.findall(r"^\| (`[^|]*) \|", table, flags=re.MULTILINE)]


def test_the_pages_list_of_folders_is_the_contract_that_is_checked():
    assert listed() == [*filter(None, contract())]


def test_every_folder_and_module_of_the_package_is_in_the_list():
    names = [path.name.removesuffix(".py") for path in (ROOT / "decentral").iterdir()]
    inside = {name for name in names if "." not in name and not name.startswith("__")}
    assert inside <= set().union(*listed())


@pytest.mark.parametrize(
    ("folder", "stranger"),
    [
        ("consensus", "torch|numpy|anyio|trio|time|socket"),
        ("optimizers", "anyio|socket|pathlib|os"),
        ("compressors", "anyio|socket|pathlib|os"),
        ("coding", "anyio|socket|pathlib|os"),
    ],
)
def test_a_pure_folder_imports_nothing_that_acts(folder: str, stranger: str):
    pattern = re.compile(rf"^\s*(?:import|from) (?:{stranger})\b.*", re.MULTILINE)
    sources = sorted((ROOT / "decentral" / folder).rglob("*.py"))
    assert [(path.name, line) for path in sources for line in pattern.findall(path.read_text(encoding="utf-8"))] == []
