"""A manifest from a file or a peer's text, checked, and put into words for people."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path

from decentral.errors import ConfigError
from decentral.manifest.presets import check_methods
from decentral.manifest.table import Table, inside, keys, one_line, plain, toml_value
from decentral.manifest.terms import INNER_OPTIMIZERS, Combining, Manifest, Model

# ---- reading, with bounds ----
#
# Files and what peers send are bounded before they are parsed.

MAX_NBYTES = 64 * 1024  # ours take 3 kB; the text may come from a peer
MAX_DOTS = 64  # in a line: the parser's time grows with the square of a dotted key, 20 s for one of 30,000 words


def load_manifest(path: str | Path) -> Manifest:
    """The manifest in a file, with its method and compressor checked (imports torch). Raises ConfigError."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_NBYTES + 1)
        text = data.decode("utf-8-sig")
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            f"{path}: cannot be read ({reason}); write one with: decentral init {shlex.quote(str(path))}"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); a manifest is a TOML file") from error
    manifest = parse_manifest(text, source=str(path))
    try:
        check_methods(manifest)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return manifest


def parse_manifest(text: str, source: str = "manifest") -> Manifest:
    """The manifest of a text; method and compressor are checked by ``check_methods``. Raises ConfigError."""
    if len(text) > MAX_NBYTES:
        raise ConfigError(f"{source}: longer than {MAX_NBYTES} bytes; a manifest is a short TOML file")
    if any(line.count(".") > MAX_DOTS for line in text.split("\n")):
        raise ConfigError(f"{source}: a line has more than {MAX_DOTS} dots; no key of ours is nested that deep")
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: its syntax error, and numbers of 5000 digits
        reason = one_line(error) if isinstance(error, ValueError) else "nested too deeply"
        raise ConfigError(f"{source}: not TOML: {reason}; correct that place") from None
    return Manifest.of(tables, source)


# ---- a summary, and differences between several ----


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
        "inner": f"{inner.steps} steps of {INNER_OPTIMIZERS[inner.optimizer_name].title} at {inner.learning_rate:g}, "
        f"weight decay {inner.weight_decay:g}",
        "outer": ", ".join(
            [
                outer.method,
                *(f"{k} {v}" for k, v in outer.hyper.items()),
                whole,
                meanwhile,
                *([_aggregation_line(outer.aggregation)] if outer.aggregation is not None else []),
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
    experts = "" if model.experts is None else f"{model.experts_of_a_token} of {model.experts} experts, "
    size = f"{model.layers} layers of {model.hidden}, {model.heads} head{'s' if model.heads > 1 else ''}"
    return f"{model.task}, {size}, {experts}context {model.context}"


def _aggregation_line(chosen: Combining) -> str:
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
