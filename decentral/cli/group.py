"""The group of commands: loads a family when it is named, ends every failure in one line and one exit code."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import click

from decentral.cli.failure import end


@dataclass(slots=True)
class Invocation:
    """What the error handler needs to know about the command that failed."""

    traceback: bool = False
    directory: Path | None = None  # the run directory, once the command knows it


class CommandGroup(click.Group):
    """Commands by the module that holds them; a command's function is found there under its own name."""

    def __init__(self, *args: Any, commands_in: Mapping[str, str], **extra: Any) -> None:  # click's own arguments
        super().__init__(*args, **extra)
        self._modules = commands_in

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the table, which is the order of use."""
        return list(self._modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module now."""
        if cmd_name not in self._modules:
            return None
        module = import_module(self._modules[cmd_name])
        command = getattr(module, f"{cmd_name}_command")
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Suggest the nearest name for an unknown one."""
        name = args[0]
        if not name.startswith("-") and name not in self._modules:
            near = get_close_matches(name, self._modules, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "decentral --help lists them"
            raise click.UsageError(f"no such command {name!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def main(  # type: ignore[override]  # click overloads on standalone_mode, which has no meaning here
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> NoReturn:
        """Run a command and end the process with the exit code that errors.py promises."""
        invocation = Invocation()
        extra |= {"standalone_mode": False, "obj": invocation}
        try:
            code: object = super().main(args, prog_name or "decentral", **extra)
        except BaseException as error:  # noqa: BLE001  the one place where every error ends
            code = end(error, directory=invocation.directory, traceback=invocation.traceback)
        raise SystemExit(code if isinstance(code, int) else 0)
