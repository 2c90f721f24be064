"""docs/pains.md: thirty pains, each with the tests that show what is done about it, or with the words "not yet"."""

import re
from pathlib import Path

from tests.docs.named_tests import NAMED, missing, rows

PAGE = (Path(__file__).parents[2] / "docs/pains.md").read_text(encoding="utf-8")


def test_there_are_thirty_with_their_numbers():
    assert [row[0] for row in rows(PAGE)] == [str(number) for number in range(1, 31)]


def test_each_has_its_test_or_says_that_there_is_none():
    for _, pain, here, shown in rows(PAGE):
        assert re.fullmatch(rf"{NAMED.pattern}(?:, {NAMED.pattern})*", shown) or "**not yet**" in here, pain


def test_every_test_that_is_named_is_there():
    assert missing(PAGE) == []
