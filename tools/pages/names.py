"""The reference of the Python interface: directives for every public name, and the errors with their exit codes."""

from __future__ import annotations

from inspect import getdoc

import decentral
from decentral import errors

_FIRST = ("join", "Peer", "follow", "Following", "Anchor")


def page() -> str:
    """The page of public names, those of a training loop first; mkdocstrings fills in signature and docstring."""
    rest = [name for name in decentral.__all__ if name not in _FIRST and not name.startswith("__")]
    shown = [*_FIRST, *(name for name in rest if not hasattr(errors, name))]
    return "# Python\n\nErrors are on [a page of their own](errors.md).\n" + "".join(map(_directive, shown))


def _directive(name: str) -> str:
    return f"\n::: {getattr(decentral, name).__module__}.{name}\n"


def errors_page() -> str:
    """The page of errors, drawn as a tree and as a table with what a command ends with."""
    tree = (errors.__doc__ or "").split("\n\n", 1)[1].rsplit("\n\n", 1)[0]
    rows = "".join(f"| `{name}` | {getattr(errors, name).exit_code} | {_means(name)} |\n" for name in errors.__all__)
    return f"# Errors\n\n```text\n{tree}\n```\n\n| error | exit code | |\n|---|---|---|\n{rows}"


def _means(name: str) -> str:
    return " ".join((getdoc(getattr(errors, name)) or "").split()).replace("``", "`")
