"""The page beside a command: whether its extra is installed, and a thread that serves it while a peer trains."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from decentral.errors import UsageError

_PACKAGES = ("starlette", "uvicorn")


def check_page_there() -> None:
    """UsageError where a package is missing."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"the page needs {' and '.join(missing)}; pip install 'decentral[dashboard]'")


def _wanted(context: click.Context, parameter: click.Parameter, wanted: bool) -> bool:
    """Refused before anything is read or made."""
    if wanted:
        check_page_there()
    return wanted


with_page = click.option(
    "--dashboard",
    is_flag=True,
    callback=_wanted,
    help="Show this peer and its swarm in the browser, on this machine only; decentral dashboard does so, too.",
)


@contextmanager
def page_beside(directory: Path, say: Callable[[str], None], *, wanted: bool) -> Iterator[None]:
    """The page of one peer for as long as the block lasts; at another port where the usual one is taken."""
    if not wanted:
        yield
        return
    import decentral
    from decentral.dashboard.serving import Place, listen

    version = decentral.__version__
    try:
        listening = listen(directory, Place(), version=version)
    except UsageError:
        listening = listen(directory, Place(port=0), version=version)
    say(f"the page: {listening.place.address}")
    with listening.beside():
        yield
