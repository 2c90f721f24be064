"""The README and the pages it leads to: every command, every preset, every exit code, and how short it is."""

import re
from pathlib import Path

from click import Context

from decentral import errors
from decentral.cli import main
from decentral.optimizers import presets

ROOT = Path(__file__).parents[2]
README, RUNNING, METHODS = (
    (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/running.md", "docs/optimizers.md")
)


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
