"""From a manifest to what people read: a summary, the differences between several."""

from __future__ import annotations

from collections.abc import Sequence

from decentral.manifest.commented import toml_value
from decentral.manifest.inner_optimizers import INNER_OPTIMIZERS
from decentral.manifest.outer_terms import Combining
from decentral.manifest.table import Table, inside, keys, plain
from decentral.manifest.terms import Manifest
from decentral.manifest.training_terms import Model


def summary(manifest: Manifest) -> str:
    """A few lines that say what joining means."""
    digest = f" {manifest.data.digest[:8]}" if manifest.data.digest is not None else ""
    run, model, data, inner, outer = manifest.run, manifest.model, manifest.data, manifest.inner, manifest.outer
    limit = f" or {run.minutes:g} minutes" if run.minutes is not None else ""
    whole = "the whole model at once" if outer.fragments == 1 else f"{outer.fragments} fragments in turn"
    meanwhile = f"training goes on for {outer.overlap} steps meanwhile" if outer.overlap else "training waits for it"
    feedback = manifest.compressor.feedback
    rows = {
        "run": f"{run.name} ({manifest.run_id}), {run.rounds} outer steps{limit}",
        "model": _model(model) if model.task == "causal-lm" else "your own script's",
        "data": f"{data.corpus}{digest}, batch {data.batch_size} per peer, {data.held_out:.0%} held out",
        "inner": f"{inner.steps} steps of {INNER_OPTIMIZERS[inner.named].title} at {inner.learning_rate:g}, "
        f"weight decay {inner.weight_decay:g}",
        "outer": ", ".join(
            [
                outer.method,
                *(f"{k} {v}" for k, v in outer.hyper.items()),
                whole,
                meanwhile,
                *([_aggregated(outer.aggregation)] if outer.aggregation is not None else []),
            ]
        ),
        "sends": f"{manifest.compressor.chain}, {manifest.exchange.kind}"
        + (f", feedback {feedback}" if feedback != "none" else ""),
        "swarm": f"at least {manifest.swarm.min_peers}, waits {manifest.swarm.deadline_ceiling:g} s at most",
    }
    kept = manifest.swarm.redundancy
    if kept is not None:
        rows["keeps"] = (
            f"{kept.megabytes} MB of others' sealed state in memory at most; "
            f"{kept.keepers} members keep yours, {kept.needed} give it back"
        )
    return "\n".join(f"{name:<8}{text}" for name, text in rows.items())


def _model(model: Model) -> str:
    experts = "" if model.experts is None else f"{model.routed} of {model.experts} experts, "
    size = f"{model.layers} layers of {model.hidden}, {model.heads} head{'s' if model.heads > 1 else ''}"
    return f"{model.task}, {size}, {experts}context {model.context}"


def _aggregated(chosen: Combining) -> str:
    keys = "".join(f" {key} {value}" for key, value in chosen.own.items())
    return f"aggregated by {chosen.rule}{keys}"


def differences(mine: Manifest, theirs: Manifest) -> list[str]:
    """Every key that differs, with both values: ``inner.steps: 30 here, 60 there``."""
    found = differing([mine, theirs]).items()
    return [f"{key}: {toml_value(here)} here, {toml_value(there)} there" for key, (here, there) in found]


def differing(several: Sequence[Manifest]) -> dict[str, list[str | int | float | None]]:
    """Every key that is not the same in all of them, with the value of each; None: it is not there."""
    found: dict[str, list[str | int | float | None]] = {}
    for table in Manifest.model_fields:
        flat = [_flat(getattr(one, table), table) for one in several]
        for key in dict.fromkeys(key for one in flat for key in one):
            values = [one.get(key) for one in flat]
            if any(value != values[0] for value in values):
                found[key] = values
    return found


def _flat(part: Table, name: str) -> dict[str, str | int | float | None]:
    """Every key with its value, those of tables inside by both names."""
    found = {f"{name}.{key}": plain(part, key) for key in keys(part)}
    for key, table in inside(part).items():
        found |= _flat(table, f"{name}.{key}")
    return found
