"""docs/aggregation.md: a row for each rule that says what is so, and a rule of somebody else's package that works."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from decentral.manifest import load_manifest, preset_manifest, rule_of
from decentral.optimizers import aggregation_names, describe_aggregations, make_aggregation
from tests.kit import outside

PAGE = outside.ROOT / "docs/aggregation.md"
TEXT = PAGE.read_text(encoding="utf-8")


def row(name: str) -> str:
    """What the table says of a rule with its default keys."""
    rule = make_aggregation(name, {})
    fields = dataclasses.fields(rule)  # type: ignore[arg-type]  # a dataclass
    keys = [f"`{field.name}`" + ("" if field.default is None else f" {field.default}") for field in fields]
    return f"| `{name}` | {rule.needs} | {rule.least} | {', '.join(keys) or 'none'} | {rule.source} |"


@pytest.mark.parametrize("name", aggregation_names())
def test_the_table_says_what_a_rule_needs_and_comes_from(name: str):
    assert row(name) in TEXT.splitlines()


def test_the_table_has_every_rule_and_no_other():
    table = TEXT.split("## All rules")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE) == aggregation_names()


def test_every_rule_and_every_key_is_described():
    for described in describe_aggregations():
        rule = make_aggregation(str(described["name"]), {})
        assert "not described" not in (rule.equation, rule.source)
        assert all("meaning" in field.metadata for field in dataclasses.fields(rule))  # type: ignore[arg-type]


def test_the_table_of_a_manifest_on_the_page_is_one(tmp_path: Path):
    (example,) = re.findall(r"```toml\n(\[outer\.aggregation\].*?)```", TEXT, flags=re.DOTALL)
    terms = tmp_path / "run.toml"
    plain = re.sub(r"(?m)^norm_clip = .*\n", "", preset_manifest("sparseloco").to_toml())
    terms.write_text(plain + example, encoding="utf-8")
    wanted = {"f": 2, "then": "centered_clip(iterations=4)"}
    assert rule_of(load_manifest(terms)) == make_aggregation("nnm", wanted)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    outside.install(PAGE, tmp_path)
    return tmp_path


@pytest.mark.long
def test_the_example_passes_every_law_of_rules(folder: Path):
    assert outside.laws(folder, "--rule", "medoid") >= 10


def test_a_package_that_is_there_is_listed_and_named_by_a_manifest(folder: Path):
    made = "from decentral.optimizers import make_aggregation as make; print(make('nnm', {'then': 'medoid'}).then)"
    done = outside.python(
        folder, "-c", f"{made}; import sys; sys.argv[1:] = ['aggregation']; from decentral.cli import main; main()"
    )
    assert done.stdout.startswith("medoid\n"), done.stderr
    assert "Clustering by Means of Medoids" in done.stdout
