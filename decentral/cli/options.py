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


def cards_by_name(context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    """Of ``--listen``: a network card's addresses for its name. UsageError for a card that there is not."""
    if not any(one[:1] != "/" for one in given):
        return given
    from decentral.transport.base import cards, listen_addresses

    return tuple(address for one in given for address in listen_addresses(one, cards()))


def presets_that_begin(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """For a shell that completes; methods of other packages are among them."""
    from decentral.optimizers.registry import presets

    return [name for name in presets() if name.startswith(begun)]
