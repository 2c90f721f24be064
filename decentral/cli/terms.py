"""From the options of ``init`` to a manifest on disk."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from decentral.errors import ConfigError, UsageError
from decentral.manifest import Manifest, check_methods, preset_manifest
from decentral.manifest.presets import justified

if TYPE_CHECKING:
    from decentral.tasks.evaluate import Survey

# option of init -> table and key of the manifest
KEYS = {
    "task": ("model", "task"),
    "experts": ("model", "experts"),
    "name": ("run", "name"),
    "seed": ("run", "seed"),
    "rounds": ("run", "rounds"),
    "minutes": ("run", "minutes"),
    "corpus": ("data", "corpus"),
    "digest": ("data", "digest"),
    "inner_steps": ("inner", "steps"),
    "overlap": ("outer", "overlap"),
    "compressor": ("compressor", "chain"),
    "min_peers": ("swarm", "min_peers"),
}


Sizes = Mapping[str, int]  # keys of [model]


def with_text(overrides: Mapping[str, object], text: "Survey") -> dict[str, object]:
    """The overrides with the corpus ``text``: its digest, and its name where no label is given. Raises UsageError."""
    named = re.sub(r"[^A-Za-z0-9 ._-]+", "-", text.path.resolve().name)[:128].lstrip(" ._-")
    label = overrides.get("corpus") or named
    if label == "stdlib":
        raise UsageError("--corpus stdlib means the standard library; give the text at --data another label")
    return {**overrides, "corpus": label or "text", "digest": text.digest}


def sized(parameters: int | None, overrides: Mapping[str, object]) -> Sizes:
    """Keys of ``[model]`` for a language model of about so many parameters; a script's model is its own.

    Raises ConfigError for a size that there is none of, UsageError beside experts.
    """
    if parameters is None or overrides["task"] == "custom":
        return {}
    if overrides["experts"] is not None:
        raise UsageError("--model-size is for a model without experts; leave out one of --model-size and --experts")
    from decentral.tasks.sizing import config_of_size  # torch

    config = config_of_size(parameters)
    return {"hidden": config.hidden, "layers": config.layers, "heads": config.heads}


def terms_of(preset: str, overrides: Mapping[str, object], sizes: Sizes, *, rounds: float | None = None) -> Manifest:
    """The preset's manifest with these keys changed, checked; the outer rate is that of ``rounds``, or as many as the
    run has. Raises ConfigError.
    """
    tables: dict[str, dict[str, object]] = {"model": dict(sizes)} if sizes else {}
    for option, value in overrides.items():
        if value is not None:
            table, key = KEYS[option]
            tables.setdefault(table, {})[key] = value
    manifest = preset_manifest(preset, **tables)
    plain = overrides.get("compressor") is None and not overrides.get("overlap")  # as what was measured
    if plain and (rate := rate_of_short(preset, rounds or manifest.run.rounds)) is not None:
        tables.setdefault("outer", {})["learning_rate"] = rate
        manifest = preset_manifest(preset, **tables)
    check_methods(manifest)
    check_fragments(manifest)
    return manifest


def rate_of_short(preset: str, rounds: float) -> float | None:
    """The outer rate that suits a run of fewer rounds than its preset is made for, else None."""
    known = justified(preset)
    return None if known is None else known.learning_rate(rounds)


def check_fragments(manifest: Manifest) -> None:
    """ConfigError when the language model of the terms has too few blocks for its fragments: one would be empty."""
    fragments, layers = manifest.outer.fragments, manifest.model.layers
    if manifest.model.task == "causal-lm" and fragments > 1 + layers:
        raise ConfigError(
            f"outer.fragments = {fragments}: the {layers} blocks of model.layers and one fragment for the rest make "
            f"{1 + layers} at most; use fewer fragments or more layers"
        )


def of_short(preset: str, manifest: Manifest, rounds: float) -> str:
    """What is said of the outer rate of so short a run; empty where it is the preset's own."""
    rate = rate_of_short(preset, rounds)
    if rate is None or manifest.outer.hyper.get("lr") != rate:
        return ""
    return (
        f"outer.learning_rate is {rate:g} for the run's {rounds:.0f} rounds: at the preset's own much of what is "
        "learnt would still be owed at the end (experiments/methods, outer_rate: 3 seeds)."
    )


def next_step(manifest: Manifest, file: Path, data: Path | None) -> str:
    """What to type when the terms are written; a script's model is trained by that script."""
    if manifest.model.task == "custom":
        return f'train your own model with it, in a script: decentral.join("{file}", model, optimizer)'
    needs = "" if data is None else f" --data {data}"
    return f"start it with: decentral start {file}{needs}"
