"""Options that several commands share, spelled once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

DEFAULT_DIRECTORY = Path("decentral-run")

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

as_json: Decorator = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")

directory_of_a_peer: Decorator = click.option(
    "--out",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=DEFAULT_DIRECTORY,
    show_default=True,
    help="Run directory of the peer.",
)


def remember(context: click.Context, directory: Path) -> Path:
    """Tell the error handler where an unexpected error may be written down."""
    context.find_root().obj.directory = directory
    return directory
