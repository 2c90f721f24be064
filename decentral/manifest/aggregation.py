"""How contributions become one vector: what [outer.aggregation] names, and what it does not fit. Loads torch.

``outer.norm_clip = "median"`` is the older spelling of ``rule = "norm_clip"``; a manifest has one of the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from decentral.errors import ConfigError
from decentral.manifest.terms import Manifest
from decentral.plugins import nearest

if TYPE_CHECKING:
    from decentral.compressors import Compressor, Feedback
    from decentral.optimizers import Aggregation, OuterMethod


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

    rule, kind, named = rule_of(manifest), manifest.exchange.kind, _named(manifest)
    if rule.needs == "nothing":
        return
    if kind == "pair":
        raise ConfigError(
            f"{named}: of two contributions nobody can tell which one is typical; "
            'leave it unset, or use exchange.kind = "gather" or "reduce"'
        )
    if method.divides and rule.name != "norm_clip":
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


def _named(manifest: Manifest) -> str:
    """The key that says the rule."""
    chosen = manifest.outer.aggregation
    return 'outer.norm_clip = "median"' if chosen is None else f'outer.aggregation.rule = "{chosen.rule}"'
