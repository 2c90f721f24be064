"""One method's spelling: ``name`` or ``name(key=number, ...)``."""

import re
from typing import Any

from decentral.errors import ConfigError
from decentral.plugins import Plugins

__all__ = ["make"]

_METHOD = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:\(([^()]*)\))?\s*", re.ASCII)
_ARGUMENT = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*([^\s=]+)\s*", re.ASCII)


def make(word: str, methods: Plugins, example: str) -> Any:
    """The method of a spelling; ConfigError, with the nearest name, when there is none."""
    match = _METHOD.fullmatch(word)
    if match is None:
        raise ConfigError(f'{methods.kind} "{word.strip()}": want name or name(key=number, ...), such as {example}')
    return methods.make(match[1], _arguments(match[2] or "", f"{methods.kind} {match[1]}"))


def _arguments(text: str, method: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for word in text.split(",") if text.strip() else []:
        match = _ARGUMENT.fullmatch(word)
        if match is None:
            raise ConfigError(f'{method}: "{word.strip()}" is not key=number')
        if match[1] in found:
            raise ConfigError(f"{method}: {match[1]} is given twice; keep one")
        found[match[1]] = _number(match[2], method)
    return found


def _number(word: str, method: str) -> float:
    try:
        return int(word) if re.fullmatch(r"[+-]?\d+", word, re.ASCII) else float(word)
    except ValueError:
        raise ConfigError(f'{method}: "{word}" is not a number') from None
