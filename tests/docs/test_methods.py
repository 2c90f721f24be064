"""docs/methods against the package: each method has its place on one page, and what the page says of it is so."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from decentral.optimizers import Channel, OuterMethod, describe_optimizers, make_outer, presets

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {page.stem: page.read_text(encoding="utf-8") for page in sorted((DOCS / "methods").glob("*.md"))}
CHOOSER = (DOCS / "optimizers.md").read_text(encoding="utf-8")
LISTED = {str(row["name"]): row for row in describe_optimizers()}  # what `decentral optimizers` prints
ASPECTS = ("Keys", "For", "Not for", "Costs", "Pitfalls", "Source")
NAMES = sorted(set(LISTED) & set(presets()))  # and not those of packages that this machine happens to have


def headings(page: str) -> list[str]:
    return re.findall(r"^## `(\w+)`$", page, flags=re.MULTILINE)


def home(name: str) -> str:
    """The page of a method."""
    (stem,) = (stem for stem, page in PAGES.items() if name in headings(page))
    return stem


def section(name: str) -> str:
    """Of a method, with all white space alike: lines are broken where they are full."""
    return " ".join(PAGES[home(name)].split(f"\n## `{name}`\n")[1].split("\n## ")[0].split())


def channel(one: Channel) -> str:
    return f"`{one.name}`" + (f" every {one.every}" if one.every > 1 else "")


def terms(name: str) -> str:
    """What a preset puts around its method."""
    preset = presets()[name]
    told = [f"`{preset.compressor}`"]
    told += [f"`{preset.feedback}`"] if preset.feedback != "none" else []
    told += [f"`{preset.exchange}`"]
    told += [f"{key} {value}" for key, value, usual in _beside(name) if value != usual]
    return ", ".join(told)


def _beside(name: str) -> list[tuple[str, object, object]]:
    preset = presets()[name]
    beside = [("fragments", preset.fragments, 1), ("overlap", preset.overlap, 0), ("norm clip", preset.norm_clip, None)]
    return beside + [(f"`inner.{key}`", spelled(value), "") for key, value in preset.inner.items()]


def row(name: str) -> str:
    """What the table of a page says of a method with its default keys."""
    listed, method = LISTED[name], make_outer(name, {})
    sent = ", ".join(channel(one) for one in method.channels())
    state, owes = listed["state_per_parameter"], presets()[name].feedback != "none"
    held = 4 * (1 + state + owes)  # bytes: the anchor, the state, the debt
    bits = f"{listed['sent_bits_per_parameter']:.4g}"
    return f"| [`{name}`](#{name}) | {sent} | {state} | {held} | {terms(name)} | {bits} |"


def spelled(value: object) -> str:
    if value is None:
        return "unset"
    return json.dumps(value) if isinstance(value, str) else f"{value:g}"


def keys(method: OuterMethod) -> str:
    """Keys of [outer] and their defaults."""
    fields = dataclasses.fields(method)  # type: ignore[arg-type]  # each method is a dataclass
    names = {field.name: "learning_rate" if field.name == "lr" else field.name for field in fields}
    return ", ".join(f"`{names[field.name]}` {spelled(field.default)}" for field in fields)


def test_every_method_has_a_heading_on_exactly_one_page_and_no_page_one_that_is_not_there():
    assert sorted(name for page in PAGES.values() for name in headings(page)) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_what_its_page_says_of_a_method_is_so(name: str):
    """The row of the table, the equation, the keys with their defaults, the source, and every aspect in its order."""
    method, text = make_outer(name, {}), section(name)
    assert row(name) in PAGES[home(name)].splitlines()
    assert method.equation in text
    assert f"- *Keys*: {keys(method)}." in text
    assert method.source.rsplit(", ", 1)[1] in text
    assert f"[`{type(method).__module__.rsplit('.', 1)[1]}.py`]" in text
    assert tuple(re.findall(r"- \*([A-Z][a-z ]+)\*:", text)) == ASPECTS
    assert (method.topology == "pair") == (home(name) == "gossip"), "pairs meet on the page of gossip alone"
    (target,) = re.findall(rf"^\| `{name}` \| \[[\w -]+\]\(([^)]*)\)", CHOOSER, flags=re.MULTILINE)
    assert target == f"methods/{home(name)}.md#{name}", "the chooser leads there"


@pytest.mark.parametrize("stem", PAGES)
def test_a_page_has_a_row_for_each_of_its_methods_in_their_order_and_ends_with_what_was_measured(stem: str):
    assert re.findall(r"^\| \[`(\w+)`\]", PAGES[stem], flags=re.MULTILINE) == headings(PAGES[stem])
    last = PAGES[stem].split("\n## ")[-1]
    assert last.startswith("Measured\n")
    assert [name for name in headings(PAGES[stem]) if f"`{name}`" not in last] == []
