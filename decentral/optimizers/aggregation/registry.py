"""Aggregation rules by name: ours, and those of other packages.

Other packages add rules through the entry point group "decentral.aggregation".
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any

from decentral import plugins
from decentral.errors import ConfigError
from decentral.optimizers.aggregation.base import Aggregation
from decentral.plugins import Plugins

__all__ = ["aggregation_names", "describe_aggregation_keys", "describe_aggregations", "make_aggregation", "rule_after"]

GROUP = "decentral.aggregation"
_HOMES = ("by_coordinate", "by_gram", "by_norm")  # modules of rules


@cache
def _rules() -> Plugins:
    # Imported here: a rule that works on another's output asks this module for that one.
    modules = [import_module(f"{__package__}.{name}") for name in _HOMES]
    ours = [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Aggregation) and value.__module__ == module.__name__
    ]
    return Plugins("aggregation rule", GROUP, MappingProxyType({one.name: one for one in ours if hasattr(one, "name")}))


def aggregation_names() -> list[str]:
    """The names of our rules."""
    return sorted(_rules().ours)


def make_aggregation(name: str, keys: Mapping[str, Any]) -> Aggregation:  # Any: numbers, and words where a key is one
    """The rule of a name; ConfigError, with the nearest name or key, when there is none."""
    return _check(name, _rules().make(name, keys))


def rule_after(word: str, f: int) -> Aggregation:
    """The rule that works on what another one made, as ``then`` spells it: ``krum``, or ``rfa(iterations=8)``.

    Where the spelling has no f of its own, the same f contributors are suspected.
    """
    made = _check(word, plugins.make(word, _rules(), "krum or rfa(iterations=8)"))
    if made.needs == "rows":
        raise ConfigError(f'then = "{word}" goes by coordinates, and what it would be given are mixtures; use "rfa"')
    has_f = "f" in {field.name for field in dataclasses.fields(made)}  # type: ignore[arg-type]  # see Plugins
    if has_f and not re.search(r"\bf\s*=", word):
        made = dataclasses.replace(made, f=f)  # type: ignore[type-var]
    return made


def describe_aggregation_keys(name: str) -> list[tuple[str, Any, str]]:  # Any: the defaults
    """A rule's own keys in order: key, default, meaning. None of an unknown one."""
    try:
        fields = dataclasses.fields(make_aggregation(name, {}))  # type: ignore[arg-type]  # a dataclass: see Plugins
    except ConfigError:
        return []
    return [(one.name, one.default, one.metadata.get("meaning", one.name)) for one in fields]


def describe_aggregations() -> list[dict[str, object]]:
    """Return a row per rule: name, what it needs to know, its keys, equation, source."""
    return [_describe(name, make_aggregation(name, {})) for name in _rules().names()]


def _describe(name: str, rule: Aggregation) -> dict[str, object]:
    return {
        "name": name,
        "needs": rule.needs,
        "contributors": rule.least,
        "keys": dataclasses.asdict(rule),  # type: ignore[call-overload]  # see describe_aggregation_keys
        "equation": rule.equation,
        "source": rule.source,
    }


def _check(name: str, made: object) -> Aggregation:
    if not isinstance(made, Aggregation):
        raise ConfigError(f"aggregation rule {name}: it is no rule.Aggregation; ask its author")
    return made
