"""docs/choosing.md against the table that it is about."""

from pathlib import Path

from decentral.manifest.presets import classes, find_justification

PAGE = (Path(__file__).parents[2] / "docs/choosing.md").read_text(encoding="utf-8")
WORDS = {"5mbit": "5 Mbit/s", "20mbit": "20 Mbit/s", "100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s"}


def test_every_class_of_lines_is_in_the_table_with_its_preset():
    table = PAGE.split("## Which preset")[1].split("\n## ")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| ")][1:]
    assert [row[2].strip(" `") for row in rows] == [one.preset for one in classes()]
    for row, one in zip(rows, classes(), strict=True):
        assert row[1].strip().startswith(WORDS[one.up_to])


def test_it_says_that_evidence_is_thin_as_long_as_it_is():
    thin = any(known.is_thin for one in classes() if (known := find_justification(one.preset)) is not None)
    assert thin == ("The evidence is thin" in PAGE)
