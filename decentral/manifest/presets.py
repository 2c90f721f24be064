"""Manifests of known algorithms, the check that a manifest's methods exist and fit, and which preset is for which line.

Importing this loads no torch. Making a preset's manifest does, and so does a check.
"""

from __future__ import annotations

import math
import secrets
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NoReturn, overload

from decentral.errors import ConfigError, UsageError
from decentral.manifest.table import check_tables
from decentral.manifest.terms import INNER_OPTIMIZERS, Inner, Manifest, Model, Outer
from decentral.plugins import nearest
from decentral.quantities import parse_rate

if TYPE_CHECKING:
    from decentral.compressors import Compressor, Feedback
    from decentral.optimizers import Aggregation, Channel, OuterMethod

__all__ = [
    "ENOUGH_SEEDS",
    "MOST_LOST_OF_A_STATE",
    "Class",
    "Justified",
    "Scale",
    "check_methods",
    "check_rule",
    "class_of",
    "classes",
    "default_preset",
    "default_scale",
    "faster",
    "find_justification",
    "fresh_salt",
    "no_faster",
    "preset_manifest",
    "rule_of",
    "suit",
]

# ---- a preset's manifest ----


def fresh_salt() -> str:
    """A random word from the operating system, so that two runs with equal terms are still two."""
    return secrets.token_hex(4)


@overload
def preset_manifest(
    preset: str, *, rounds: int | None = None, steps: int | None = None, **tables: Mapping[str, object]
) -> Manifest: ...


@overload  # for tables that are unpacked: none of them may be taken for a count
def preset_manifest(preset: str, **tables: Mapping[str, object]) -> Manifest: ...


def preset_manifest(
    preset: str,
    *,
    rounds: int | Mapping[str, object] | None = None,
    steps: int | Mapping[str, object] | None = None,
    **tables: Mapping[str, object],
) -> Manifest:
    """The manifest of a known algorithm, with a fresh salt unless one is given: ``rounds`` of ``steps`` inner steps.

    Other keys are changed by table: ``preset_manifest("diloco", rounds=10, swarm={"lease": 60.0})``.
    Raises ConfigError for an unknown preset or key, naming the nearest, or a value that cannot be.
    """
    from decentral.optimizers import presets  # torch

    chosen = presets().get(str(preset))
    if chosen is None:
        raise UsageError(f"preset {str(preset)[:60]!r} does not exist; {nearest(str(preset), list(presets()))}")
    check_tables({f"preset {preset}: {name}": keys for name, keys in tables.items()}, "the table's keys")
    given: dict[str, dict[str, object]] = {
        "run": {"name": preset},
        "model": dict(chosen.model),
        "inner": dict(chosen.inner),
        "outer": {
            "method": preset,
            **chosen.hyper,
            "fragments": _by_blocks(chosen.fragments, {**chosen.model, **tables.get("model", {})}),
            "overlap": chosen.overlap,
            "norm_clip": chosen.norm_clip,
        },
        "compressor": {"chain": chosen.compressor, "feedback": chosen.feedback},
        "exchange": {"kind": chosen.exchange},
    }
    for table, keys in tables.items():
        given[table] = given.get(table, {}) | dict(keys)
    if given["model"].get("task") != "custom":  # a script clips by itself
        given["inner"] = {"clip": 1.0, **given["inner"]}
    given["run"] |= {} if rounds is None else {"rounds": rounds}
    given["inner"] |= {} if steps is None else {"steps": steps}
    if "fragments" not in tables.get("outer", {}):  # inner steps that nobody chose follow them
        parts = given["outer"]["fragments"]
        given["inner"].setdefault("steps", parts * max(2, -(-Inner.model_fields["steps"].default // parts)))
    made = Manifest.of(given, f"preset {preset}")
    if "method" not in tables.get("outer", {}):
        _check_keys(made.outer)
    return made if "salt" in given["run"] else made.with_salt(fresh_salt())


def _by_blocks(fragments: int, model: Mapping[str, Any]) -> int:  # Any: as above
    """The preset's fragments, or more, so that none has more than three blocks; a script's blocks are not known here.

    Three at every depth is Streaming DiLoCo's choice: what is sent at once does not grow with the depth.
    """
    layers = model.get("layers", Model.model_fields["layers"].default)
    if fragments == 1 or model.get("task") == "custom" or not isinstance(layers, int):  # which is refused
        return fragments
    return max(fragments, -(-layers // _BLOCKS) + 1)


_BLOCKS = 3  # of a fragment at most


# ---- methods that exist and fit ----

MOST_LOST_OF_A_STATE = 0.05  # of the norm; replicas of gossip stay about as far apart: see replica/pair_step.py


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
    if method.summary.rebuilds:
        _check_sends_nothing(manifest)
    if method.summary.most_steps is not None and manifest.inner.steps > method.summary.most_steps:
        raise ConfigError(
            f"inner.steps = {manifest.inner.steps} does not fit outer.method {manifest.outer.method}: a contribution "
            f"can tell of {method.summary.most_steps} inner steps; use {method.summary.most_steps} or fewer"
        )
    if channels[0].is_replica and feedback.sender:
        raise ConfigError(
            f'compressor.feedback = "{feedback}" does not fit outer.method {manifest.outer.method}: it sends '
            'parameters, whole each time, and keeps its change to itself, so that nothing is owed; use "none"'
        )
    if method.summary.divides and feedback.sender:
        raise ConfigError(
            f'compressor.feedback = "{feedback}" does not fit outer.method {manifest.outer.method}: its peers train '
            'different parts, and what is owed of a part that another peer has by then would not count; use "none"'
        )
    if len(channels) > 1 or channels[0].is_replica:
        _check_states(manifest, channels)
    if method.inner and manifest.model.task != "custom":
        _check_moments(manifest, [channel.name for channel in method.channels()[1:]])
    forward_only = INNER_OPTIMIZERS[manifest.inner.optimizer_name].forward_only
    if method.summary.divides and forward_only:
        raise ConfigError(
            f'inner.optimizer = "{manifest.inner.optimizer_name}" does not fit outer.method {manifest.outer.method}: '
            "it steps along all parameters at once, and those that a peer does not train are only noise to it; use an "
            "inner optimizer that goes by gradients"
        )
    if method.by_gradients and forward_only:
        raise ConfigError(
            f'inner.optimizer = "{manifest.inner.optimizer_name}" does not fit outer.method {manifest.outer.method}: '
            "it makes no gradients, which the method reads and turns; use an inner optimizer that goes by gradients"
        )
    if method.timing.is_by_time:
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
        f'sent, and {why}; use "gather", or "ef(beta=0.95)"'
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
    named, kept = manifest.inner.optimizer_name, {name for one in INNER_OPTIMIZERS.values() for name in one.moments}
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


# ---- the rule that combines contributions ----
#
# [outer.aggregation] names it, and it may not fit the rest.
#
# ``outer.norm_clip = "median"`` is the older spelling of ``rule = "norm_clip"``; a manifest has one of the two.


def rule_of(manifest: Manifest) -> Aggregation:
    """The rule by which contributions become one vector. Raises ConfigError."""
    from decentral.optimizers import describe_aggregation_keys, make_aggregation

    outer = manifest.outer
    if outer.aggregation is None:
        return make_aggregation("norm_clip" if outer.norm_clip == "median" else "mean", {})
    if outer.norm_clip == "median":
        raise ConfigError(
            f'outer.norm_clip = "median" is the older spelling of a rule, and outer.aggregation.rule = '
            f'"{outer.aggregation.rule}" is another; leave out outer.norm_clip'
        )
    rule, keys = outer.aggregation.rule, outer.aggregation.own
    make_aggregation(rule, {})
    known = [key for key, _, _ in describe_aggregation_keys(rule)]
    for key in keys:
        if key not in known:
            own = nearest(key, known) if known else f"{rule} has none of its own"
            raise ConfigError(f"unknown key outer.aggregation.{key}; {own}")
    return make_aggregation(rule, keys)


def check_rule(manifest: Manifest, method: OuterMethod, compressor: Compressor, feedback: Feedback) -> None:
    """ConfigError for a rule that would not see what it needs, or would lose what nobody owes again."""
    from decentral.compressors.base import is_sparse

    rule, kind, named = rule_of(manifest), manifest.exchange.kind, _rule_key(manifest)
    if rule.needs == "nothing":
        return
    if kind == "pair":
        raise ConfigError(
            f"{named}: of two contributions nobody can tell which one is typical; "
            'leave it unset, or use exchange.kind = "gather" or "reduce"'
        )
    if method.summary.divides and rule.name != "norm_clip":
        raise ConfigError(
            f"{named} does not fit outer.method {manifest.outer.method}: its peers train different parts of the model "
            "and send zeros elsewhere, so that what each sends is unlike the others' and would be left out as wrong; "
            'use rule = "mean" or "norm_clip"'
        )
    if kind == "reduce" and rule.needs != "norms":
        raise ConfigError(
            f'{named} does not fit exchange.kind = "reduce": it compares what each peer sent, and a reduce leaves '
            'their mean; use exchange.kind = "gather", or a rule that looks at norms'
        )
    if kind == "reduce" and feedback.sender:
        raise ConfigError(
            f"{named} does not fit compressor.feedback in a reduce: an owner whose range moved sends "
            "what it owes with its own slice, and a clip would take that from everybody; leave one of the two out"
        )
    if rule.needs != "norms" and method.channels()[0].combine == "each":
        raise ConfigError(
            f"{named} does not fit outer.method {manifest.outer.method}, which takes every contribution as it is and "
            'has a rule of its own; leave outer.aggregation out, or use rule = "norm_clip"'
        )
    if rule.needs == "products" and feedback.receiver:
        raise ConfigError(
            f'{named} does not fit compressor.feedback = "{feedback}": it compares what frames hold, and those hold '
            'changes of what was sent before; use "ef(beta=0.95)", or a rule that looks at norms'
        )
    if rule.needs == "rows" and is_sparse(compressor):
        raise ConfigError(
            f'{named} does not fit compressor.chain = "{compressor}": it goes by coordinates, and most of what a peer '
            'sends is zeros there, so that hardly any would move; use a rule by inner products, as "rfa" or "nnm"'
        )


def _rule_key(manifest: Manifest) -> str:
    """The key that says the rule."""
    chosen = manifest.outer.aggregation
    return 'outer.norm_clip = "median"' if chosen is None else f'outer.aggregation.rule = "{chosen.rule}"'


# ---- which preset is justified for which line ----
#
# As ``justified.toml`` has it. No torch.

ENOUGH_SEEDS = 5  # of a table that shows that one method is better than another


@dataclass(frozen=True, slots=True)
class Class:
    """Lines of at most so much."""

    up_to: str  # as it is written: 20mbit
    preset: str
    why: str

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return parse_rate(self.up_to)


@dataclass(frozen=True, slots=True)
class Justified:
    """With how many inner steps a preset is known to work, and from where."""

    least: int  # H
    shown: int  # H, the most with which it was shown to train well
    published: str
    table: str  # our own
    seeds: int  # of that table
    rounds: int = 0  # the fewest that a run should have
    rates: Sequence[Mapping[str, float]] = ()  # rounds and parameters at most, and keys of [outer] that suit those
    why_rate: str = ""  # and why not the preset's own
    unhindered: str = ""  # what speaks for it on a slower class's line where a model is so small that nobody waits
    gathers: bool = False  # everybody gets each frame, where the line can carry that

    def outer(self, rounds: float, parameters: float) -> Mapping[str, float]:
        """Keys of [outer] for a run of so many rounds of a model of so many parameters; empty: the preset's own."""
        fits = (one for one in self.rates if rounds <= one["rounds"] and parameters <= one.get("parameters", math.inf))
        found = next(fits, {})
        return {key: value for key, value in found.items() if key not in ("rounds", "parameters")}

    @property
    def is_thin(self) -> bool:
        """True where our own table is of too few seeds to tell methods apart."""
        return self.seeds < ENOUGH_SEEDS

    @property
    def evidence(self) -> str:
        """Say what stands behind it, thin or not."""
        seeds = f"{self.seeds} seed{'s' if self.seeds > 1 else ''}"
        thin = f", which is thin, as {ENOUGH_SEEDS} would be needed" if self.is_thin else ""
        return f"{self.published}; {self.table}: {seeds}{thin}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large a round is: what each peer's frame is made of, to how many it goes, and through what."""

    parameters: int
    peers: int
    rate: float  # bytes/s of everybody's line, each way

    @property
    def carries_dense(self) -> bool:
        """Tell whether a frame of a byte for each parameter is with everybody in time."""
        return self.parameters * (self.peers - 1) <= self.rate * float(_document()["assumed"]["seconds"])


def default_scale(*, parameters: int | None = None, peers: int | None = None) -> Scale:
    """Where nobody said more than this: the line and all else that is left out is what most have, or are safe with."""
    told = _document()["assumed"]
    return Scale(
        parameters=parameters or int(told["parameters"]),
        peers=peers or int(told["peers"]),
        rate=parse_rate(str(told["link"])),
    )


def default_preset(scale: Scale) -> str:
    """The dense method while the line carries it; the one that sends least only where it does not."""
    return str(_document()["assumed"]["dense"]) if scale.carries_dense else class_of(scale.rate).preset


def classes() -> list[Class]:
    """Slowest first."""
    return [Class(**one) for one in _document()["class"]]


def class_of(rate: float) -> Class:
    """The class of a line of ``rate`` bytes per second; a faster line than all of them is in the fastest."""
    known = classes()
    return next((one for one in known if rate <= one.rate), known[-1])


def no_faster(one: Class) -> list[str]:
    """The presets of this class and of all slower ones, each once, in the order in which they are tried."""
    known = classes()
    return list(dict.fromkeys(other.preset for other in reversed(known[: known.index(one) + 1])))


def faster(one: Class) -> list[str]:
    """The presets of the classes above this one that are not its own, slowest first."""
    known = classes()
    return [name for name in dict.fromkeys(other.preset for other in known[known.index(one) :]) if name != one.preset]


def find_justification(preset: str) -> Justified | None:
    """Return what is known of a preset; None where nothing is written down."""
    found = _document()["preset"].get(preset)
    return None if found is None else Justified(**found)


def suit(preset: str, manifest: Manifest, rounds: float, scale: Scale) -> Manifest:
    """With the outer rate and the exchange that suit so many rounds and such a model."""
    known = find_justification(preset)
    if known is None:
        return manifest
    if keys := known.outer(rounds, scale.parameters):
        manifest = manifest.changed(outer=keys)
    if known.gathers and scale.carries_dense:
        manifest = manifest.changed(exchange={"kind": "gather"})
    return manifest


@cache
def _document() -> Mapping[str, Any]:  # Any: values of TOML
    return tomllib.loads(files("decentral.manifest").joinpath("justified.toml").read_text(encoding="utf-8"))
