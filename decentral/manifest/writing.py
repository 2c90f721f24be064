"""From a manifest to what people read: the commented file, a summary, the differences between two."""

from __future__ import annotations

import json

from decentral.manifest.terms import Manifest, Table, plain

_COMMENT_COLUMN = 32


def to_toml(manifest: Manifest) -> str:
    """One table after the other, one comment per key; unset keys are commented out with an example."""
    head = "# The terms of one run. All peers must have the same: the digest of these values is the run's id.\n"
    return head + "".join(_table(name, getattr(manifest, name)) for name in Manifest.model_fields)


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
        "model": f"{model.task}, {model.layers} layers of {model.hidden}, {model.heads} heads, context {model.context}"
        if model.task == "causal-lm"
        else "your own script's",
        "data": f"{data.corpus}{digest}, batch {data.batch_size} per peer, {data.held_out:.0%} held out",
        "inner": f"{inner.steps} steps of AdamW at {inner.learning_rate:g}, weight decay {inner.weight_decay:g}",
        "outer": ", ".join([outer.method, *(f"{k} {v:g}" for k, v in outer.hyper.items()), whole, meanwhile]),
        "sends": f"{manifest.compressor.chain}, {manifest.exchange.kind}"
        + (f", feedback {feedback}" if feedback != "none" else ""),
        "swarm": f"at least {manifest.swarm.min_peers}, waits {manifest.swarm.deadline_ceiling:g} s at most",
    }
    return "\n".join(f"{name:<8}{text}" for name, text in rows.items())


def differences(mine: Manifest, theirs: Manifest) -> list[str]:
    """Every key that differs, with both values: ``inner.steps: 30 here, 60 there``."""
    found = []
    for table in Manifest.model_fields:
        here, there = getattr(mine, table), getattr(theirs, table)
        for key in type(here).model_fields:
            a, b = plain(here, key), plain(there, key)
            if a != b:
                found.append(f"{table}.{key}: {_value(a)} here, {_value(b)} there")
    return found


def _table(name: str, part: Table) -> str:
    lines = [f"\n[{name}]  # {_first_sentence(part)}"]
    for key, field in type(part).model_fields.items():
        value = plain(part, key)
        unset = value is None
        line = f"# {key} = {_value(field.examples[0])}" if unset and field.examples else f"{key} = {_value(value)}"
        lines.append(f"{line:<{_COMMENT_COLUMN}}  # {field.description}")
    return "\n".join(lines) + "\n"


def _first_sentence(part: Table) -> str:
    return (type(part).__doc__ or "").split(".")[0].strip().lower()


def _value(value: object) -> str:
    """As TOML writes it; every string here is ASCII without control characters, so JSON's quotes serve."""
    return "unset" if value is None else json.dumps(value)
