"""Outer optimizers by name, and the presets: an algorithm with everything that its paper puts around it.

Other packages add outer optimizers through the entry point group "decentral.optimizers".
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from decentral.optimizers.base import OuterOptimizer
from decentral.optimizers.diloco import DiLoCo, outer_learning_rate
from decentral.optimizers.noloco import NoLoCo
from decentral.optimizers.sparseloco import SparseLoCo
from decentral.optimizers.streaming import StreamingDiLoCo
from decentral.plugins import Plugins

__all__ = ["PRESETS", "Preset", "describe_optimizers", "make_outer"]

_OURS = (DiLoCo, StreamingDiLoCo, SparseLoCo, NoLoCo)
_METHODS = Plugins("outer optimizer", "decentral.optimizers", MappingProxyType({m.name: m for m in _OURS}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """What ``decentral init --preset`` writes into a manifest."""

    method: str  # a name that make_outer knows
    hyper: Mapping[str, float]  # its hyper-parameters; lr for 2 to 5 peers where it depends on their number
    compressor: str  # canonical spelling
    feedback: str  # canonical spelling
    exchange: Literal["reduce", "gather", "pair"]
    fragments: int  # blocks are strided over all but the last, which has the rest; 1: the whole model
    overlap: int  # tau: inner steps between contribution and merge
    alpha: float | None  # the live copy's weight in merge; None carries
    lr_by_peers: bool = False
    norm_clip: Literal["median"] | None = None  # contributions far longer than the typical one are shortened to it

    def hyper_for(self, num_peers: int) -> dict[str, float]:
        """The hyper-parameters for an expected number of peers."""
        chosen = dict(self.hyper)
        if self.lr_by_peers:
            chosen["lr"] = outer_learning_rate(num_peers)
        return chosen


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "diloco": Preset(
            method="diloco",
            hyper=MappingProxyType({"lr": 0.6, "momentum": 0.9}),
            compressor="int8(block=4096)",
            feedback="none",
            exchange="reduce",
            fragments=1,
            overlap=0,
            alpha=None,
            norm_clip="median",
            lr_by_peers=True,
        ),
        "streaming": Preset(
            method="streaming",
            hyper=MappingProxyType({"lr": 0.4, "momentum": 0.9, "alpha": 0.5}),
            compressor="e3m0(block=256)",
            feedback="none",
            exchange="gather",
            fragments=3,
            overlap=1,
            alpha=0.5,
        ),
        "sparseloco": Preset(
            method="sparseloco",
            hyper=MappingProxyType({"lr": 1.0}),
            compressor="topk(k=64, chunk=4096) >> signmag2",
            feedback="ef(beta=0.95)",
            exchange="gather",
            fragments=1,
            overlap=0,
            alpha=None,
            norm_clip="median",
        ),
        "noloco": Preset(
            method="noloco",
            hyper=MappingProxyType({"alpha": 0.5, "beta": 0.7, "gamma": 0.7}),
            compressor="fp16",
            feedback="none",
            exchange="pair",
            fragments=1,
            overlap=0,
            alpha=None,
        ),
    }
)


def make_outer(name: str, hyper: Mapping[str, float]) -> OuterOptimizer | NoLoCo:
    """The outer optimizer of a name; ConfigError, with the nearest name or key, when there is none."""
    made: OuterOptimizer | NoLoCo = _METHODS.make(name, hyper)
    return made


def describe_optimizers() -> list[dict[str, object]]:
    """One row per method: name, equation, default hyper-parameters, preset's compressor and exchange, source."""
    return [_describe(name, _METHODS.make(name, {})) for name in _METHODS.names()]


def _describe(name: str, optimizer: Any) -> dict[str, object]:  # Any: a dataclass, perhaps of an entry point
    preset = PRESETS.get(name)
    return {
        "name": name,
        "equation": getattr(optimizer, "equation", "not described"),
        "hyper": dataclasses.asdict(optimizer),
        "compressor": preset.compressor if preset else None,
        "exchange": preset.exchange if preset else None,
        "source": getattr(optimizer, "source", "not described"),
    }
