"""Manifests of known algorithms, and the check that a manifest's methods exist and fit. Loads torch."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from decentral.errors import ConfigError, UsageError
from decentral.manifest.reading import checked, nearest
from decentral.manifest.terms import Manifest


def fresh_salt() -> str:
    """A random word from the operating system, so that two runs with equal terms are still two."""
    return secrets.token_hex(4)


def preset_manifest(preset: str, **tables: Mapping[str, Any]) -> Manifest:  # Any: values of every key
    """The manifest of a known algorithm, with a fresh salt unless one is given.

    Keys are changed by table: ``preset_manifest("diloco", run={"rounds": 10}, inner={"steps": 50})``.
    Raises ConfigError for an unknown preset or key, naming the nearest, or a value that cannot be.
    """
    from decentral.optimizers.registry import PRESETS  # torch

    chosen = PRESETS.get(preset)
    if chosen is None:
        raise UsageError(f"preset {preset[:60]!r} does not exist; {nearest(preset, list(PRESETS))}")
    hyper = dict(chosen.hyper)
    rate = hyper.pop("lr", None)
    given: dict[str, dict[str, Any]] = {  # Any: as above
        "run": {"name": preset, "salt": fresh_salt()},
        "inner": {"clip": 1.0},
        "outer": {
            "method": chosen.method,
            "learning_rate": None if chosen.lr_by_peers else rate,
            **hyper,
            "fragments": chosen.fragments,
            "overlap": chosen.overlap,
            "norm_clip": chosen.norm_clip,
        },
        "compressor": {"chain": chosen.compressor, "feedback": chosen.feedback},
        "exchange": {"kind": chosen.exchange},
    }
    for table, keys in tables.items():
        given[table] = given.get(table, {}) | dict(keys)
    return checked(given, f"preset {preset}")


def check_methods(manifest: Manifest) -> None:
    """Raise ConfigError unless outer optimizer, compressor and exchange exist and fit one another."""
    from decentral.compressors import parse_compressor, parse_feedback  # torch
    from decentral.optimizers import NoLoCo, make_outer

    gossips = isinstance(make_outer(manifest.outer.method, manifest.outer.hyper), NoLoCo)
    parse_compressor(manifest.compressor.chain)
    feedback = parse_feedback(manifest.compressor.feedback)
    if feedback.receiver:
        raise ConfigError(
            f'compressor.feedback = "{feedback}": receivers add up what is sent, so the same peers must contribute to '
            'every round, and in a swarm they do not; use "ef(beta=0.95)" or "dgc"'
        )
    kind = manifest.exchange.kind
    if gossips != (kind == "pair"):
        fits = '"pair"' if gossips else '"gather" or "reduce"'
        raise ConfigError(f'exchange.kind = "{kind}" does not fit outer.method {manifest.outer.method}; use {fits}')
    if gossips and manifest.outer.norm_clip == "median":
        raise ConfigError(
            'outer.norm_clip = "median": of two contributions nobody can tell which one is typical; '
            'leave it unset, or use exchange.kind = "gather" or "reduce"'
        )
