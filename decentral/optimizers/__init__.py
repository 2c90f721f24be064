"""Outer methods: each class the whole algorithm, the source's equation beside the code.

A method is a frozen dataclass derived from `OuterMethod`, whose fields are the keys that ``[outer]`` accepts for it.
They are found by name: every module of this folder that holds one, and those that other packages add through the entry
point group "decentral.optimizers".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType
from typing import Any

from decentral.compressors import parse_compressor
from decentral.compressors.base import bits_per_value
from decentral.errors import ConfigError
from decentral.optimizers.aggregation.base import Aggregation
from decentral.optimizers.aggregation.registry import (
    aggregation_names,
    describe_aggregation_keys,
    describe_aggregations,
    make_aggregation,
)
from decentral.optimizers.base import (
    CHANGE,
    NO_MOMENTS,
    Channel,
    Contributor,
    InnerOptimizer,
    Live,
    OuterMethod,
    Preset,
    RoundInfo,
    Speaking,
    Summary,
    Timing,
    compressor_beside,
    key,
    keys_of,
    rate,
)
from decentral.optimizers.mean import mean_pseudo_gradient
from decentral.optimizers.steps import blend, carry
from decentral.plugins import Plugins
from decentral.tensors.memory import fresh_zeros

__all__ = [
    "CHANGE",
    "NO_MOMENTS",
    "Aggregation",
    "Channel",
    "Contributor",
    "InnerOptimizer",
    "Live",
    "OuterMethod",
    "Preset",
    "RoundInfo",
    "Speaking",
    "Summary",
    "Timing",
    "aggregation_names",
    "blend",
    "bring",
    "carry",
    "compressor_beside",
    "describe_aggregation_keys",
    "describe_aggregations",
    "describe_keys",
    "describe_optimizers",
    "key",
    "make_aggregation",
    "make_outer",
    "mean_pseudo_gradient",
    "methods_with",
    "presets",
    "rate",
]

_MANY = 1024  # parameters, of a fragment whose state is counted


@cache
def _methods() -> Plugins:
    modules = [import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__)]
    named = [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, OuterMethod) and hasattr(value, "name")
        if value.__module__ == module.__name__
    ]
    return Plugins("outer optimizer", "decentral.optimizers", MappingProxyType({one.name: one for one in named}))


def make_outer(name: str, hyper: Mapping[str, float | str | None]) -> OuterMethod:
    """The outer method of a name; ConfigError, with the nearest name or key, when there is none."""
    made = _methods().make(name, hyper)
    if not isinstance(made, OuterMethod):
        raise ConfigError(f"outer optimizer {name}: it is no decentral.optimizers.OuterMethod; ask its author")
    return made


def describe_keys(name: str) -> list[tuple[str, Any, str]]:  # Any: the defaults
    """A method's own keys of [outer] in order, beside learning_rate: key, default or an example where that is None,
    meaning. None of an unknown one.
    """
    try:
        fields = dataclasses.fields(make_outer(name, {}))  # type: ignore[arg-type]  # a dataclass: see Plugins
    except ConfigError:
        return []
    return [
        (one.name, one.metadata.get("example", one.default), one.metadata.get("meaning", one.name))
        for one in fields
        if one.name != "lr"
    ]


def methods_with(key: str) -> list[str]:
    """Return those of our methods that have this key of [outer]; no other package is loaded for it."""
    return [name for name in sorted(_methods().ours) if key in [own for own, _, _ in describe_keys(name)]]


def bring(method: type[OuterMethod]) -> None:
    """Know a method by its name in this process, as if a package added it. ConfigError where it cannot be."""
    _methods().bring(method)


def presets(*, ours: bool = False) -> dict[str, Preset]:
    """The presets by name, of our methods and of those that others add; ``ours``: no other package is loaded for it.

    A method of others that states none has a plain one. What does not load has none; ``make_outer`` says why.
    """
    known = _methods()
    found = {name: method.preset for name, method in known.ours.items() if method.preset}  # type: ignore[attr-defined]
    for name in () if ours else known.names():
        if name not in known.ours:
            with suppress(ConfigError):
                found[name] = _preset_of(make_outer(name, {}))
    return found


def _preset_of(method: OuterMethod) -> Preset:
    """Return what it states; else contributions go whole, to a partner or to everybody: so that any equation fits."""
    return method.preset or Preset(compressor="none", exchange="pair" if method.topology == "pair" else "gather")


def describe_optimizers() -> list[dict[str, object]]:
    """Return a row per method: name, family, topology, keys of [outer] with their defaults, channels, state and bits
    that a peer sends per parameter and round, the preset's compressor, feedback and exchange, equation, source.
    """
    return [_describe(name, make_outer(name, {})) for name in _methods().names()]


def _describe(name: str, method: OuterMethod) -> dict[str, object]:
    row: dict[str, object] = {
        "name": name,
        "family": _family(method),
        "topology": method.topology,
        "keys": keys_of(method),
    }
    row |= {"channels": [channel.name for channel in method.channels()], "state_per_parameter": _state_of(method)}
    preset = presets().get(name)
    if preset is not None:
        row["sent_bits_per_parameter"] = round(_bits_of(method, preset), 3)
        row |= {"compressor": preset.compressor, "feedback": preset.feedback, "exchange": preset.exchange}
    return row | {"equation": method.equation, "source": method.source}


def _family(method: OuterMethod) -> str:
    """Return what people who choose a method sort by."""
    if method.topology == "pair":
        return "gossip"
    return "asynchronous" if method.timing.quorum else "synchronous"


def _state_of(method: OuterMethod) -> float:
    """Values that every peer holds beside each parameter of the anchor."""
    return sum(tensor.numel() for tensor in method.init(fresh_zeros(_MANY)).values()) // _MANY


def _bits_of(method: OuterMethod, preset: Preset) -> float:
    """At most, before entropy coding, in the mean over rounds; a reduce sends the results of a peer's own part, too."""
    if method.summary.rebuilds:
        return 0.0
    each = [
        bits_per_value(parse_compressor(channel.compressor or preset.compressor)) / channel.every
        for channel in method.channels()
    ]
    return sum(each) * (2 if preset.exchange == "reduce" else 1)
