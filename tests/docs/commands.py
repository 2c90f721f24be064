"""Commands on pages: found, and parsed by click as a shell would hand them over."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click

from decentral.cli import main
from decentral.cli.group import Invocation

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELLS = {"", "console", "bash", "sh"}
LINE = re.compile(r"^(?:\$ )?((?:\.venv/bin/)?(?:decentral|python) .*)$", re.MULTILINE)


def commands_of(page: Path) -> Iterator[list[str]]:
    """The words of every command in the page's fenced blocks, without what stands behind ``#`` or ``>``."""
    for language, block in FENCE.findall(page.read_text(encoding="utf-8")):
        if language in SHELLS:
            for line in LINE.findall(block.replace("\\\n", " ")):
                words = shlex.split(line, comments=True)
                yield words[: words.index(">")] if ">" in words else words


def check(words: list[str]) -> None:
    """Raise click's error where ``decentral WORDS`` cannot be meant. Files it names need not be there."""
    context = click.Context(main, info_name="decentral", obj=Invocation())
    command, rest = descend(main, context, words)
    below = click.Context(command, parent=context, info_name=command.name)
    values, left, order = command.make_parser(below).parse_args(list(rest))
    if any(values.get(one.name or "") is True for one in command.get_params(below) if one.is_eager):
        return  # --help and the like: nothing else is looked at
    assert not left, f"{left} are too many words"
    for parameter in order:
        value = values.get(parameter.name or "")
        if isinstance(value, str) and not isinstance(parameter.type, click.Path):
            parameter.type_cast_value(below, value if not parameter.multiple else (value,))
    for parameter in command.get_params(below):
        given = isinstance(values.get(parameter.name or ""), (str, tuple, list))  # what is not, click marks its own way
        assert given or not parameter.required, f"{parameter.name} is missing"


def descend(group: click.Group, context: click.Context, words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that the first words name, through groups, and the words behind it."""
    _, command, rest = group.resolve_command(context, words)
    assert command is not None
    if isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        return descend(command, context, rest)
    return command, rest
