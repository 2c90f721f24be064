"""Manifests of known algorithms, and the check that a manifest's methods exist and fit. Loads torch."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from decentral.errors import ConfigError, UsageError
from decentral.manifest.aggregation import check_rule, rule_of
from decentral.manifest.inner_optimizers import INNER_OPTIMIZERS
from decentral.manifest.outer_terms import Outer
from decentral.manifest.terms import Manifest
from decentral.plugins import nearest

if TYPE_CHECKING:
    from decentral.compressors import Compressor  # torch
    from decentral.optimizers import Channel

MOST_LOST_OF_A_STATE = 0.05  # of the norm; replicas of gossip stay about as far apart: see replica/pair_step.py


def fresh_salt() -> str:
    """A random word from the operating system, so that two runs with equal terms are still two."""
    return secrets.token_hex(4)


def preset_manifest(preset: str, **tables: Mapping[str, Any]) -> Manifest:  # Any: values of every key
    """The manifest of a known algorithm, with a fresh salt unless one is given.

    Keys are changed by table: ``preset_manifest("diloco", run={"rounds": 10}, inner={"steps": 50})``.
    Raises ConfigError for an unknown preset or key, naming the nearest, or a value that cannot be.
    """
    from decentral.optimizers import presets  # torch

    chosen = presets().get(preset)
    if chosen is None:
        raise UsageError(f"preset {preset[:60]!r} does not exist; {nearest(preset, list(presets()))}")
    given: dict[str, dict[str, Any]] = {  # Any: as above
        "run": {"name": preset, "salt": fresh_salt()},
        "model": dict(chosen.model),
        "inner": {"clip": 1.0, **chosen.inner},
        "outer": {
            "method": preset,
            **chosen.hyper,
            "fragments": chosen.fragments,
            "overlap": chosen.overlap,
            "norm_clip": chosen.norm_clip,
        },
        "compressor": {"chain": chosen.compressor, "feedback": chosen.feedback},
        "exchange": {"kind": chosen.exchange},
    }
    for table, keys in tables.items():
        given[table] = given.get(table, {}) | dict(keys)
    return Manifest.of(given, f"preset {preset}")


def check_methods(manifest: Manifest) -> None:
    """Raise ConfigError unless outer optimizer, compressor and exchange exist and fit one another."""
    from decentral.compressors import parse_compressor, parse_feedback  # torch
    from decentral.compressors.base import needs_matrices
    from decentral.optimizers import make_outer

    _check_keys(manifest.outer)
    rule_of(manifest)
    method = make_outer(manifest.outer.method, manifest.outer.hyper)
    gossips = method.topology == "pair"
    compressor = parse_compressor(manifest.compressor.chain)
    feedback = parse_feedback(manifest.compressor.feedback)
    kind = manifest.exchange.kind
    if gossips != (kind == "pair"):
        fits = '"pair"' if gossips else '"gather" or "reduce"'
        raise ConfigError(f'exchange.kind = "{kind}" does not fit outer.method {manifest.outer.method}; use {fits}')
    if feedback.receiver and kind != "gather":
        _refuse_receivers(str(feedback), kind)
    channels = method.channels()
    if method.rebuilds:
        _check_sends_nothing(manifest)
    if method.most_steps is not None and manifest.inner.steps > method.most_steps:
        raise ConfigError(
            f"inner.steps = {manifest.inner.steps} does not fit outer.method {manifest.outer.method}: a contribution "
            f"can tell of {method.most_steps} inner steps; use {method.most_steps} or fewer"
        )
    if channels[0].is_replica and feedback.sender:
        raise ConfigError(
            f'compressor.feedback = "{feedback}" does not fit outer.method {manifest.outer.method}: it sends '
            'parameters, whole each time, and keeps its change to itself, so that nothing is owed; use "none"'
        )
    if method.divides and feedback.sender:
        raise ConfigError(
            f'compressor.feedback = "{feedback}" does not fit outer.method {manifest.outer.method}: its peers train '
            'different parts, and what is owed of a part that another peer has by then would not count; use "none"'
        )
    if len(channels) > 1 or channels[0].is_replica:
        _check_states(manifest, channels)
    if method.inner and manifest.model.task != "custom":
        _check_moments(manifest, [channel.name for channel in method.channels()[1:]])
    if method.overrides("is_due"):
        _check_no_pace(manifest)
    if gossips:
        _check_pair(manifest)
    elif kind == "reduce" and any(channel.combine == "each" for channel in channels):
        raise ConfigError(
            f'exchange.kind = "reduce" does not fit outer.method {manifest.outer.method}: it compares what each peer '
            'sent, and a reduce leaves their mean; use exchange.kind = "gather"'
        )
    elif kind == "reduce" and needs_matrices(compressor):
        raise ConfigError(
            f'compressor.chain = "{compressor}" does not fit exchange.kind = "reduce": it shrinks matrices only, and a '
            'reduce cuts them into flat ranges; use exchange.kind = "gather"'
        )
    check_rule(manifest, method, compressor, feedback)


def _refuse_receivers(feedback: str, kind: str) -> NoReturn:
    """ConfigError: receivers of such a mechanism add up what each sender sent, so they must get all of it."""
    why = (
        "an owner gets slices of ranges that move from round to round"
        if kind == "reduce"
        else "partners change from step to step"
    )
    raise ConfigError(
        f'compressor.feedback = "{feedback}" does not fit exchange.kind = "{kind}": receivers add up what each peer '
        f'sent, and {why}; use "gather", or "ef(beta=0.95)" or "dgc"'
    )


def _check_keys(outer: Outer) -> None:
    """ConfigError for a key that is neither of all methods nor the method's own: whose it is, or the nearest name."""
    from decentral.optimizers import describe_keys, make_outer, methods_with  # torch

    make_outer(outer.method, {})
    known = [key for key, _, _ in describe_keys(outer.method)]
    for key in outer.model_extra or {}:
        if key in known:
            continue
        if others := methods_with(key):
            own = f"{outer.method} has {', '.join(known)}" if known else f"{outer.method} has none of its own"
            raise ConfigError(f"unknown key outer.{key}; it is one of {', '.join(others)}, and {own}")
        raise ConfigError(f"unknown key outer.{key}; {nearest(key, [*type(outer).model_fields, *known])}")


def _check_sends_nothing(manifest: Manifest) -> None:
    """ConfigError for what would act on vectors, of a method whose frames are empty."""
    terms, rule = manifest.compressor, rule_of(manifest)
    for told, found, only in (
        ("exchange.kind", manifest.exchange.kind, "gather"),
        ("compressor.chain", terms.chain, "none"),
        ("compressor.feedback", terms.feedback, "none"),
        ("outer.aggregation.rule", rule.name, "mean"),
        ("outer.weighting", manifest.weighting, "equal"),  # each number counts: a peer of fewer steps sends fewer
    ):
        if found != only:
            raise ConfigError(
                f'{told} = "{found}" does not fit outer.method {manifest.outer.method}: its contributions are numbers '
                f'in the offers, and its frames are empty; use "{only}"'
            )


def _check_pair(manifest: Manifest) -> None:
    """ConfigError for what a pair of peers would not do, or could not do without drifting apart."""
    weighting, overlap = manifest.outer.weighting, manifest.outer.overlap
    if weighting not in (None, "equal"):
        raise ConfigError(
            f'outer.weighting = "{weighting}" does not fit exchange.kind = "pair": both of a pair count the same, or '
            'their mean would not be kept; leave it out or use "equal"'
        )
    if overlap:
        raise ConfigError(
            f'outer.overlap = {overlap} does not fit exchange.kind = "pair": a peer waits for its partner before it '
            "goes on; set it to 0"
        )
    if manifest.inner.pace not in (None, "equal"):
        raise ConfigError(
            f'inner.pace = "{manifest.inner.pace}" does not fit exchange.kind = "pair": a peer waits for one partner, '
            "and no round for a slow peer; leave it out"
        )


def _check_no_pace(manifest: Manifest) -> None:
    """ConfigError for a pace beside a method that says by itself when a contribution is due."""
    if manifest.inner.pace not in (None, "equal"):
        raise ConfigError(
            f'inner.pace = "{manifest.inner.pace}" does not fit outer.method {manifest.outer.method}: it decides by '
            "itself after how many inner steps a peer contributes; leave it out"
        )


def _check_moments(manifest: Manifest, wanted: list[str]) -> None:
    """ConfigError for an inner optimizer that has not, of every parameter, the moments that the method averages."""
    named, kept = manifest.inner.named, {name for one in INNER_OPTIMIZERS.values() for name in one.moments}
    wanted = [name for name in wanted if name in kept]
    if missing := [name for name in wanted if name not in INNER_OPTIMIZERS[named].moments]:
        fits = [f'"{name}"' for name, known in INNER_OPTIMIZERS.items() if set(wanted) <= set(known.moments)]
        raise ConfigError(
            f'inner.optimizer = "{named}" does not fit outer.method {manifest.outer.method}, which averages '
            f"{' and '.join(missing)}: it keeps none for every parameter; use {' or '.join(fits) or 'another method'}"
        )


def _check_states(manifest: Manifest, channels: Sequence[Channel]) -> None:
    """ConfigError for a compressor that loses much of what a method sends whole each time: a first channel that is a
    replica, and all beside it.
    """
    from decentral.compressors import parse_compressor  # torch
    from decentral.optimizers import compressor_beside

    chain, own = parse_compressor(manifest.compressor.chain), compressor_beside(channels)
    if channels[0].is_replica or (len(channels) > 1 and own is None):
        _check_keeps_states(f'compressor.chain = "{chain}"', chain, manifest)
    if own is not None:
        names = " and ".join(channel.name for channel in channels[1:])
        _check_keeps_states(f'compressor "{own}" of {names}', parse_compressor(own), manifest)


def _check_keeps_states(told: str, compressor: Compressor, manifest: Manifest) -> None:
    from decentral.compressors.base import relative_error  # torch

    lost = relative_error(compressor)
    if lost > MOST_LOST_OF_A_STATE:
        raise ConfigError(
            f"{told} does not fit outer.method {manifest.outer.method}: it would lose "
            f"{lost:.0%} of the values that are sent whole each time, which no feedback makes up for; use one "
            f'that loses {MOST_LOST_OF_A_STATE:.0%} at most, as "fp16", "fp8(block=256)" or "int8(block=4096)"'
        )
