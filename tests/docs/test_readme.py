"""README.md against the package: every command, every preset, every exit code, and the model of its example."""

import re
from pathlib import Path

from click import Context

from decentral import errors
from decentral.cli import main
from decentral.optimizers import presets

PAGE = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


METHODS = (Path(__file__).parents[2] / "docs/optimizers.md").read_text(encoding="utf-8")


def section(heading: str, page: str = PAGE) -> str:
    return page.split(f"## {heading}\n")[1].split("\n## ")[0]


def first_column(text: str) -> list[str]:
    return [
        name for cell in re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)
    ]


def test_every_command_is_in_the_table_once():
    assert sorted(first_column(section("Train with others"))) == sorted(main.list_commands(Context(main)))


def test_every_preset_is_in_the_table_of_methods_once_and_some_are_in_the_readme():
    assert sorted(first_column(section("Which method", METHODS))) == sorted(presets())
    named = first_column(section("Which method"))
    assert len(named) == len(set(named))
    assert set(named) < set(presets())


def test_every_exit_code_of_the_error_tree_is_in_the_table():
    codes = {one.exit_code for one in vars(errors).values() if isinstance(one, type) and hasattr(one, "exit_code")}
    assert {str(code) for code in codes} <= set(re.findall(r"\| (\d+) \|", section("Exit codes")))
