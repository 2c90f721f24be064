"""The README and single pages, each against what it is about: commands, presets, exit codes, words, and named tests."""

import re
from pathlib import Path

from click import Context

from decentral import errors
from decentral.cli import main
from decentral.manifest.presets import classes, find_justification
from decentral.optimizers import presets
from tests.docs.named_tests import NAMED, missing, rows

ROOT = Path(__file__).parents[2]


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


README, RUNNING, METHODS = (text_of(name) for name in ("README.md", "docs/running.md", "docs/optimizers.md"))
CHOOSING, GLOSSARY, PAINS, TRUST = (text_of(f"docs/{name}.md") for name in ("choosing", "glossary", "pains", "trust"))


def section(heading: str, page: str) -> str:
    return page.split(f"## {heading}\n")[1].split("\n## ")[0]


def first_column(text: str) -> list[str]:
    return [
        name for cell in re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)
    ]


def test_every_command_is_in_the_table_once():
    assert sorted(first_column(section("Commands", RUNNING))) == sorted(main.list_commands(Context(main)))


def test_every_preset_is_in_the_table_of_methods_once():
    assert sorted(first_column(section("Which method", METHODS))) == sorted(presets())


def test_the_readme_is_read_in_three_minutes_and_shows_python_on_its_first_screen():
    assert len(README.split()) <= 800
    assert "```python" in README.split("\n")[:40]


def test_every_exit_code_of_the_error_tree_is_in_the_table():
    codes = {one.exit_code for one in vars(errors).values() if isinstance(one, type) and hasattr(one, "exit_code")}
    assert {str(code) for code in codes} <= set(re.findall(r"\| (\d+) \|", section("Exit codes", RUNNING)))


# ---- docs/choosing.md: the table of lines and presets ----

RATES = {"5mbit": "5 Mbit/s", "20mbit": "20 Mbit/s", "100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s"}


def test_every_class_of_lines_is_in_the_table_with_its_preset():
    table = CHOOSING.split("## Which preset")[1].split("\n## ")[0]
    lines = [line.split("|") for line in table.splitlines() if line.startswith("| ")][1:]
    assert [row[2].strip(" `") for row in lines] == [one.preset for one in classes()]
    for row, one in zip(lines, classes(), strict=True):
        assert row[1].strip().startswith(RATES[one.up_to])


def test_it_says_that_evidence_is_thin_as_long_as_it_is():
    thin = any(known.is_thin for one in classes() if (known := find_justification(one.preset)) is not None)
    assert thin == ("The evidence is thin" in CHOOSING)


# ---- docs/glossary.md ----

WORDS = re.findall(r"^\| ([\w ]+) \| (.+?) \| `(decentral/[\w/]+\.py)` \|$", GLOSSARY, flags=re.MULTILINE)
WANTED = {
    *("run", "manifest", "peer", "swarm", "relay", "invite", "anchor", "change", "fragment", "channel", "compressor"),
    *("debt", "frame", "round", "commit", "epoch", "snapshot", "quorum", "grace", "staleness", "follower", "H"),
    *("inner step", "outer step"),
}


def test_each_word_is_there_once_with_one_sentence_and_one_module():
    words = [word for word, _, _ in WORDS]
    assert len(words) == len(set(words)) == GLOSSARY.count("\n| ") - GLOSSARY.count("\n| Word |")
    assert set(words) >= WANTED
    for word, sentence, _ in WORDS:
        assert sentence.endswith("."), word
        assert ". " not in sentence, word


# ---- docs/pains.md and docs/trust.md: no promise without a test, and no test that is not there ----


def test_every_test_that_is_named_is_there():
    assert missing(PAINS) == missing(TRUST) == []
    assert missing("`tests/docs/test_pages.py::test_that_nobody_wrote`") != []


def test_there_are_thirty_pains_and_each_has_its_test_or_says_that_there_is_none():
    assert [row[0] for row in rows(PAINS)] == [str(number) for number in range(1, 31)]
    for _, pain, here, shown in rows(PAINS):
        assert re.fullmatch(rf"{NAMED.pattern}(?:, {NAMED.pattern})*", shown) or "**not yet**" in here, pain


QUESTIONS = (
    "Joining does not let others run code on your computer",
    "What leaves this machine",
    "What others can see",
    "What a hostile peer can and cannot do",
)


def test_the_questions_that_people_ask_are_answered_by_sentences():
    for question in QUESTIONS:
        assert len(rows(section(question, TRUST))) >= 5, question


def test_every_sentence_of_a_table_is_one_and_has_its_test():
    for claim, held in rows(TRUST):
        assert claim.endswith("."), claim
        assert NAMED.fullmatch(held), claim


def test_what_is_not_promised_is_said():
    assert len(re.findall(r"^- That ", TRUST.split("## Not promised\n")[1], flags=re.MULTILINE)) >= 3
