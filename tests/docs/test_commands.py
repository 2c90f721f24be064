"""Every command in a fenced block of README.md and ``docs/``: the command line understands it."""

from pathlib import Path

import click
import pytest

from tests.docs.commands import check, commands_of

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def of_decentral(page: Path) -> list[list[str]]:
    return [words[1:] for words in commands_of(page) if words[0].endswith("decentral")]


@pytest.mark.parametrize("page", [page for page in PAGES if of_decentral(page)], ids=lambda page: page.name)
def test_every_command_on_a_page_can_be_meant(page: Path):
    for words in of_decentral(page):
        try:
            check(words)
        except (click.ClickException, AssertionError) as error:
            pytest.fail(f"decentral {' '.join(words)}: {getattr(error, 'message', error)}")


def test_commands_are_found_where_they_are():
    assert sum(len(of_decentral(page)) for page in PAGES) > 40
    assert len(of_decentral(ROOT / "docs/tutorial.md")) > 15


@pytest.mark.parametrize(
    "typed", ["joins INVITE", "join INVITE --max-up 3", "pause --for ever", "start", "status here", "set max-upload"]
)
def test_a_command_that_cannot_be_meant_is_noticed(typed: str):
    with pytest.raises((click.ClickException, AssertionError)):
        check(typed.split())
