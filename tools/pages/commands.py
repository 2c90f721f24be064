"""The reference of the command line: what ``--help`` says, of every command, in the order of use."""

from __future__ import annotations

from collections.abc import Iterator

from click import Command, Context, Group

from decentral.cli import main

_WIDTH = 110  # columns: what a page shows without scrolling


def page() -> str:
    """The page, in Markdown."""
    sections = (
        f"## {name}\n\n```text\n{text}\n```\n"
        for name, text in helps(main, Context(main, info_name="decentral", **main.context_settings))
    )
    return "# Commands\n\nWhat `--help` says, of every command.\n\n" + "\n".join(sections)


def helps(command: Command, context: Context) -> Iterator[tuple[str, str]]:
    """A command's full name and its help, then those of the commands below it."""
    context.terminal_width = context.max_content_width = _WIDTH
    yield context.command_path, command.get_help(context)
    if isinstance(command, Group):
        for name in command.list_commands(context):
            if (below := command.get_command(context, name)) and not below.hidden:
                yield from helps(below, Context(below, parent=context, info_name=name, **below.context_settings))
