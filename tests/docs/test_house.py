"""The package in totals: tools/house.toml against the sources, and the counting itself on a small package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import house


def test_the_package_has_no_more_modules_lines_importers_and_folders_than_it_had():
    allowed = house.figures()
    assert not [told for name, now in house.totals().items() if (told := house.verdict(name, now, allowed[name]))]


def test_every_docstring_begins_with_a_verb_or_a_noun():
    paths = sorted((house.ROOT / "decentral").rglob("*.py"))
    wrong = {str(path.relative_to(house.ROOT)): text for path in paths for text in house.wrong_first_words(path)}
    assert not wrong


def test_no_test_module_is_imported_by_another_one():
    """Helpers stand in tests/kit, or in a helper module of their folder: a test that goes takes nobody else's along."""
    imports = re.compile(r"^\s*(?:from|import) (tests[.\w]*\.test_\w+|tests[.\w]* import .*\btest_\w+)", re.MULTILINE)
    paths = sorted((house.ROOT / "tests").rglob("*.py"))
    found = {str(path.relative_to(house.ROOT)): imports.findall(path.read_text(encoding="utf-8")) for path in paths}
    assert {path: modules for path, modules in found.items() if modules} == {}


@pytest.mark.parametrize(("now", "says"), [(4, "rose from 3 to 4"), (2, "fell from 3 to 2"), (3, "")])
def test_a_total_that_rises_or_falls_unsaid_is_told(now: int, says: str):
    assert says in house.verdict("folders", now, 3)
    assert bool(house.verdict("folders", now, 3)) == bool(says)


def test_totals_count_modules_beside_the_core_apart_and_imports_wherever_they_stand(tmp_path: Path):
    sources = {
        "decentral/__init__.py": "from decentral.core import first\n",
        "decentral/core/__init__.py": "",
        "decentral/core/first.py": "import decentral.core.second\n",
        "decentral/core/second.py": "def late():\n    from decentral.core import third\n    return third\n",
        "decentral/core/third.py": '"""Whether it counts."""\n',
        "decentral/lab/study.py": "from decentral.core.third import what\nfrom decentral.core.first import that\n",
        "decentral/laboratory/much.py": "",
    }
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert house.totals(tmp_path) == {
        "core_modules": 4,
        "all_modules": 5,
        "core_lines": 100,  # rounded up
        "modules_with_one_importer": 2,  # second by first, first by study: what a package imports does not count
        "folders": 4,
        "first_words": 1,
    }
