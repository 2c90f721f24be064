"""docs/trust.md: no sentence of its tables without a test, and no test that is not there."""

import re
from pathlib import Path

from tests.docs.named_tests import NAMED, missing, rows

PAGE = (Path(__file__).parents[2] / "docs/trust.md").read_text(encoding="utf-8")
QUESTIONS = (
    "Joining does not let others run code on your computer",
    "What leaves this machine",
    "What others can see",
    "What a hostile peer can and cannot do",
)


def test_the_questions_that_people_ask_are_answered_by_sentences():
    for question in QUESTIONS:
        assert len(rows(PAGE.split(f"## {question}\n")[1].split("\n## ")[0])) >= 5, question


def test_every_sentence_of_a_table_is_one_and_has_its_test():
    for claim, held in rows(PAGE):
        assert claim.endswith("."), claim
        assert NAMED.fullmatch(held), claim


def test_every_test_that_is_named_is_there():
    assert missing(PAGE) == []
    assert missing("`tests/docs/test_trust.py::test_that_nobody_wrote`") != []


def test_what_is_not_promised_is_said():
    assert len(re.findall(r"^- That ", PAGE.split("## Not promised\n")[1], flags=re.MULTILINE)) >= 3
