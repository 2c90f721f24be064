"""docs/inner-optimizers.md: a row for each that a manifest can name, and what each row says is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from decentral.manifest import parse_manifest, preset_manifest
from decentral.manifest.terms import INNER_OPTIMIZERS
from decentral.optimizers import presets

PAGE = (Path(__file__).parents[2] / "docs/inner-optimizers.md").read_text(encoding="utf-8")
ROWS = {row.split("`")[1]: row for row in PAGE.split("\n## ")[0].splitlines() if row.startswith("| `")}


def test_the_table_has_every_inner_optimizer_and_no_other_in_their_order():
    own = {name: row for name, row in ROWS.items() if name != "inner.optimizer"}
    assert list(own) == list(INNER_OPTIMIZERS)


@pytest.mark.parametrize("name", list(INNER_OPTIMIZERS))
def test_a_row_says_its_keys_their_values_and_its_moments(name: str):
    known = INNER_OPTIMIZERS[name]  # type: ignore[index]  # one of them
    keys = ", ".join(f"`{key}` {value:g}" for key, value in known.keys.items())
    moments = ", ".join(f"`{moment}`" for moment in known.moments) or "none"
    assert ROWS[name].startswith(f"| `{name}` | {keys} | {moments} | ")


def test_the_example_is_a_table_that_a_manifest_takes():
    (example,) = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)
    text = preset_manifest("diloco").to_toml()
    cut = text.index("[inner]"), text.index("[outer]")
    read = parse_manifest(text[: cut[0]] + example + text[cut[1] :])
    assert (read.inner.optimizer_name, read.inner.own()["momentum"]) == ("muon", 0.95)


def test_the_table_of_methods_has_the_presets_that_name_an_inner_optimizer():
    told = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", PAGE.split("## Methods that live from one")[1], flags=re.MULTILINE)
    named = {name: preset.inner["optimizer"] for name, preset in presets().items() if "optimizer" in preset.inner}
    assert dict(told) == named
