"""The table of lines and presets: whole, in order, and with evidence that is there."""

from pathlib import Path

import pytest

from decentral.manifest import preset_manifest
from decentral.manifest.presets import class_of, classes, justified, no_faster

LOG = Path(__file__).parents[2] / "experiments" / "LOG.md"


def test_classes_are_those_of_the_documents_slowest_first() -> None:
    assert [one.up_to for one in classes()] == ["5mbit", "20mbit", "100mbit", "1gbit"]
    assert [one.rate for one in classes()] == sorted(one.rate for one in classes())


@pytest.mark.parametrize("one", classes(), ids=lambda one: one.up_to)
def test_every_class_names_a_preset_of_which_something_is_known(one) -> None:
    known = justified(one.preset)
    assert known is not None
    assert known.least <= known.shown
    assert preset_manifest(one.preset).outer.method == one.preset


@pytest.mark.parametrize("one", classes(), ids=lambda one: one.up_to)
def test_the_table_that_stands_behind_a_preset_is_in_the_log(one) -> None:
    """No figure without the entry that it is from."""
    known = justified(one.preset)
    assert known is not None
    place, date, title = known.table.split(", ", 2)
    assert place == "experiments/LOG.md"
    assert f"## {date} {title}\n" in LOG.read_text(encoding="utf-8")
    assert f"{known.seeds} seed" in known.evidence
    assert ("which is thin" in known.evidence) == (known.seeds < 5)


def test_a_line_belongs_to_the_first_class_that_it_fits_into_and_a_faster_one_to_the_last() -> None:
    rates = (1e5, 625_000.0, 625_001.0, 2.5e6, 12.5e6, 125e6, 1e10)
    assert [class_of(rate).up_to for rate in rates] == [
        "5mbit", "5mbit", "20mbit", "20mbit", "100mbit", "1gbit", "1gbit",
    ]  # fmt: skip


def test_presets_of_slower_classes_are_tried_after_its_own() -> None:
    assert no_faster(class_of(125e6)) == ["muloco", "sparseloco"]
    assert no_faster(class_of(1e5)) == ["sparseloco"]


def test_of_other_presets_nothing_is_written_down() -> None:
    assert justified("noloco") is None
