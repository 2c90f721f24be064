"""Compressors by their spelling: ``topk(k=64, chunk=4096) >> signmag2`` and back.

Grammar: METHOD or METHOD >> METHOD, a method being ``name`` or ``name(key=number, ...)``. ``str(compressor)`` is
the canonical spelling, with every argument. Other packages add methods through the entry point group
"decentral.compressors": the name, and a frozen dataclass that is a `Compressor`; they cannot replace ours.
"""

import dataclasses
import difflib
import re
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from decentral.compressors.base import Compressor
from decentral.compressors.chain import Chain
from decentral.compressors.e3m0 import E3M0
from decentral.compressors.half import BFloat16, Float16
from decentral.compressors.int8 import Int8
from decentral.compressors.none import Uncompressed
from decentral.compressors.signmag2 import SignMag2
from decentral.compressors.topk import TopK
from decentral.errors import ConfigError

__all__ = ["describe_compressors", "parse_compressor"]

GROUP = "decentral.compressors"
_OURS = (Uncompressed, Float16, BFloat16, Int8, E3M0, TopK, SignMag2)
_LONGEST_SPELLING = 256
_MEASURED_SHAPE = (1024, 1024)  # bits per value are those of a matrix of this shape
_METHOD = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:\(([^()]*)\))?\s*", re.ASCII)
_ARGUMENT = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*([^\s=]+)\s*", re.ASCII)


def parse_compressor(spelling: str) -> Compressor:
    """The compressor of a spelling; ConfigError, with the nearest name, when there is none."""
    if len(spelling) > _LONGEST_SPELLING:
        raise ConfigError(f"compressor of {len(spelling)} characters: at most {_LONGEST_SPELLING} are read")
    methods = [_method(word, spelling) for word in spelling.split(">>")]
    if len(methods) > 2:
        raise ConfigError(f'compressor "{spelling}": one >> joins two methods; write sparsifier >> quantiser')
    return methods[0] if len(methods) == 1 else Chain(methods[0], methods[1])  # type: ignore[arg-type]  # it checks


def describe_compressors() -> list[dict[str, object]]:
    """One row per method: name, layout in words, bits_per_value, biased, source."""
    return [_describe(name, make()) for name, make in sorted(_makers().items())]


def _method(word: str, spelling: str) -> Compressor:
    match = _METHOD.fullmatch(word)
    if match is None:
        raise ConfigError(f'compressor "{spelling}": "{word.strip()}" is not name or name(key=number, ...)')
    makers = _makers()
    if match[1] not in makers:
        raise ConfigError(f'compressor "{spelling}": there is no {match[1]}; {_nearest(match[1], list(makers))}')
    return _made(match[1], makers[match[1]], _arguments(match[2] or "", spelling), spelling)


def _made(name: str, make: Callable[..., Compressor], arguments: dict[str, float], spelling: str) -> Compressor:
    known = {field.name: field.type for field in dataclasses.fields(make)}  # type: ignore[arg-type]  # a dataclass
    for key, value in arguments.items():
        if key not in known:
            raise ConfigError(f'compressor "{spelling}": {name} has no {key}; {_nearest(key, list(known))}')
        if known[key] in (int, "int") and not isinstance(value, int):
            raise ConfigError(f'compressor "{spelling}": {key}={value} must be a whole number')
    return make(**arguments)


def _arguments(text: str, spelling: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for word in text.split(",") if text.strip() else []:
        match = _ARGUMENT.fullmatch(word)
        if match is None or match[1] in found:
            raise ConfigError(f'compressor "{spelling}": "{word.strip()}" is not a new key=number')
        found[match[1]] = _number(match[2], spelling)
    return found


def _number(word: str, spelling: str) -> float:
    try:
        return int(word) if re.fullmatch(r"[+-]?\d+", word, re.ASCII) else float(word)
    except ValueError:
        raise ConfigError(f'compressor "{spelling}": "{word}" is not a number') from None


def _makers() -> dict[str, Callable[..., Any]]:  # Any: an entry point may be any callable until it is used
    added = {point.name: point for point in entry_points(group=GROUP)}
    ours: dict[str, Callable[..., Any]] = {method.name: method for method in _OURS}
    return {name: point.load() for name, point in added.items() if name not in ours} | ours


def _describe(name: str, compressor: Compressor) -> dict[str, object]:
    numel = _MEASURED_SHAPE[0] * _MEASURED_SHAPE[1]
    nbytes = sum(spec.nbytes for spec in compressor.layout(_MEASURED_SHAPE))
    about = getattr(compressor, "about", None)
    return {
        "name": name,
        "spelling": str(compressor),
        "layout": getattr(about, "layout", "not described"),
        "bits_per_value": round(8 * nbytes / numel, 5),
        "biased": getattr(about, "biased", True),
        "source": getattr(about, "source", "not described"),
    }


def _nearest(word: str, names: list[str]) -> str:
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.4)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(sorted(names)) or 'nothing'}"
