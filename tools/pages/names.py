"""The reference of the Python interface: directives for every public name, and the errors with their exit codes."""

from __future__ import annotations

from inspect import getdoc

import decentral
from decentral import errors
from decentral.peer.settings import OPTIONS

_FIRST = ("join", "Peer", "RoundEnded", "RunSchedule", "follow", "Following", "Anchor", "preset_manifest", "Manifest")
_CALLBACKS = tuple(
    f"decentral.integrations.{framework}.DecentralCallback" for framework in ("transformers", "lightning")
)
# What a method, a compressor or a rule of one's own is made of, and compared by: public, though not in `decentral`.
OF_METHODS = {
    "decentral.optimizers": ("OuterMethod", "Channel", "CHANGE", "key", "rate"),
    "decentral.optimizers.aggregation.base": ("Aggregation", "Sent", "total"),
    "decentral.compressors.base": ("About", "Method", "PartSpec", "Payload", "check_input", "check_parts", "require"),
    "decentral.coding": ("Floats", "Symbols"),
    "decentral.lab": ("study",),
}


def page() -> str:
    """The page of public names, those of a training loop first; mkdocstrings fills in signature and docstring."""
    rest = [name for name in decentral.__all__ if name not in _FIRST and not name.startswith("__")]
    shown = [*_FIRST, *(name for name in rest if not hasattr(errors, name))]
    own = [path for module, names in OF_METHODS.items() for path in (f"{module}.{name}" for name in names)]
    return (
        "# Python\n\nImport these from `decentral`. Errors are on [a page of their own](errors.md).\n"
        + "".join(_directive(_path_of(name)) + _options_of(name) for name in shown if name != "OuterMethod")
        + "\n## In somebody else's loop\n\nImport it from the module of your framework.\n"
        + "".join(map(_directive, _CALLBACKS))
        + "\n## For a method of your own\n\nImport these from the modules that they are shown with.\n"
        + "".join(map(_directive, own))
    )


def _path_of(name: str) -> str:
    return f"{getattr(decentral, name).__module__}.{name}"


def _options_of(name: str) -> str:
    """The table of join's options, which its signature takes as one; nothing for another name."""
    if name != "join":
        return ""
    head = "\nThe options of `join`:\n\n| option | default | unit | meaning |\n|---|---|---|---|\n"
    return head + "".join(
        f"| `{option}` | `{one.default!r}` | {one.unit} | {_cell(one.meaning)} {_cell(one.in_python)} |\n"
        for option, one in OPTIONS.items()
    )


def _cell(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")


def _directive(path: str) -> str:
    return f"\n::: {path}\n"


def errors_page() -> str:
    """The page of errors, drawn as a tree and as a table with what a command ends with."""
    tree = (errors.__doc__ or "").split("\n\n", 1)[1].rsplit("\n\n", 1)[0]
    rows = "".join(f"| `{name}` | {getattr(errors, name).exit_code} | {_means(name)} |\n" for name in errors.__all__)
    return f"# Errors\n\n```text\n{tree}\n```\n\n| error | exit code | |\n|---|---|---|\n{rows}"


def _means(name: str) -> str:
    return " ".join((getdoc(getattr(errors, name)) or "").split()).replace("``", "`")
