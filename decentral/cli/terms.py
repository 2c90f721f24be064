"""From the options of ``init`` to a manifest on disk."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from decentral.errors import ConfigError, UsageError
from decentral.manifest import Manifest, check_methods, preset_manifest
from decentral.manifest.presets import Scale, default_scale, find_justification, suit

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
    "shared": ("data", "shared"),
    "inner_steps": ("inner", "steps"),
    "inner_rate": ("inner", "learning_rate"),
    "decay": ("inner", "weight_decay"),
    "clip": ("inner", "clip"),
    "overlap": ("outer", "overlap"),
    "stages": ("outer", "fragments"),
    "compressor": ("compressor", "chain"),
    "min_peers": ("swarm", "min_peers"),
}


Sizes = Mapping[str, int]  # keys of [model]

_DECAY_OF_TORCH = 0.01  # of a script's AdamW that names none: other terms would be warned of at every start


def with_text(
    overrides: Mapping[str, object], text: "Survey", url: str | None = None, *, is_shared: bool = False
) -> dict[str, object]:
    """The overrides with the corpus ``text``: its digest, its name where no label is given, and how it comes to who
    joins without it, if it does. Raises UsageError.
    """
    named = re.sub(r"[^A-Za-z0-9 ._-]+", "-", text.path.resolve().name)[:128].lstrip(" ._-")
    label = overrides.get("corpus") or named
    if label == "stdlib":
        raise UsageError("--corpus stdlib means the standard library; give the text at --data another label")
    found = {**overrides, "corpus": label or "text", "digest": text.digest}
    if is_shared or url is not None:
        found["shared"] = _describe_shared(text, url, is_shared=is_shared)
    return found


def _describe_shared(text: "Survey", url: str | None, *, is_shared: bool) -> dict[str, object]:
    """The keys of ``[data.shared]``."""
    from decentral.dissemination.text import list_chunks, list_digest
    from decentral.tasks.corpus import chunks

    found: dict[str, object] = {"nbytes": text.nbytes}
    if is_shared:
        found["chunks"] = list_digest(list_chunks(piece for _, piece in chunks(text.path)), text.nbytes)
    return found if url is None else {**found, "url": url}


def model_sizes(parameters: int | None, overrides: Mapping[str, object]) -> Sizes:
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


def terms_of(
    preset: str,
    overrides: Mapping[str, object],
    sizes: Sizes,
    *,
    rounds: float | None = None,
    scale: Scale | None = None,
) -> Manifest:
    """The preset's manifest with these keys changed, checked; outer rate and exchange are those of ``rounds``, or as
    many as the run has, and of ``scale``, or what is assumed. Raises ConfigError.
    """
    tables: dict[str, dict[str, object]] = {"model": dict(sizes)} if sizes else {}
    if overrides["task"] == "custom" and overrides.get("clip") is not None:
        raise UsageError("--clip is for causal-lm; with --task custom your script clips, or does not")
    if overrides["task"] == "custom" and overrides.get("experts") is not None:
        raise UsageError("--experts is for causal-lm; with --task custom your script's model has the experts")
    for option, value in overrides.items():
        if value is not None:
            table, key = KEYS[option]
            tables.setdefault(table, {})[key] = value
    if (stages := overrides.get("stages")) is not None:
        steps = preset_manifest(preset, inner=tables.get("inner", {})).inner.steps
        tables["outer"]["layout"] = "stages"
        if overrides["task"] != "custom" and overrides.get("experts") is None:
            tables.setdefault("model", {})["tied"] = False  # else its first and last stage are one
        if overrides.get("inner_steps") is None:  # each stage has its turn after as many
            tables.setdefault("inner", {})["steps"] = steps + -steps % int(str(stages))
    if overrides["task"] == "custom" and overrides.get("decay") is None:
        tables.setdefault("inner", {})["weight_decay"] = _DECAY_OF_TORCH
    manifest = preset_manifest(preset, **tables)
    if overrides.get("compressor") is None and not overrides.get("overlap"):  # as what was measured
        manifest = suit(preset, manifest, rounds or manifest.run.rounds, scale or scale_of(manifest))
    check_methods(manifest)
    check_fragments(manifest)
    return manifest


def of_loss(manifest: Manifest) -> str:
    """The sentence about what a sparsifier drops for good where nothing is owed; empty elsewhere."""
    from decentral.compressors import parse_compressor  # torch
    from decentral.compressors.base import is_sparse, relative_error

    compressor = parse_compressor(manifest.compressor.chain)
    if manifest.compressor.feedback != "none" or not is_sparse(compressor):
        return ""
    lost = f"{relative_error(compressor):.0%} of a contribution, in norm,"
    return f"compressor.feedback = none: {lost} is dropped for good; the preset sparseloco sends it later."


def scale_assumed(overrides: Mapping[str, object], sizes: Sizes, model_size: int | None, peers: int | None) -> Scale:
    """How large a round would be, by what was said of the model and the peers."""
    if overrides["task"] == "custom":
        return default_scale(parameters=model_size, peers=peers)
    experts = {} if overrides["experts"] is None else {"experts": overrides["experts"]}
    return scale_of(preset_manifest("local_sgd", model={**sizes, **experts}), peers=peers)


def why_default(preset: str, scale: Scale, *, is_told: bool) -> str:
    """Why this preset is written where nobody named one; ``is_told``: how large the model is."""
    mbit, seconds = 8e-6 * scale.rate, scale.parameters * (scale.peers - 1) / scale.rate
    size = "" if is_told else " (--model-size says how large yours is)"
    frames = f"a frame of {scale.parameters / 1e6:.2g} MB{size} for each of {scale.peers - 1} others"
    lines = f"{preset}: lines of {mbit:g} Mbit/s are assumed (--link says another), on which {frames} takes"
    if scale.carries_dense:
        return f"{lines} {seconds:.2g} s; dense frames learn most in a round."
    return f"{lines} {seconds:.0f} s; this sends least."


def scale_of(manifest: Manifest, *, parameters: int | None = None, peers: int | None = None) -> Scale:
    """The scale of a round of these terms, assumed where it is not known."""
    if manifest.model.task == "causal-lm":
        from decentral.tasks.sizing import LanguageModelConfig, parameters_of  # torch

        parameters = parameters_of(LanguageModelConfig.of(manifest.model))
    return default_scale(parameters=parameters, peers=peers)


def check_fragments(manifest: Manifest) -> None:
    """ConfigError when the language model of the terms has too few blocks for its fragments: one would be empty."""
    outer, layers = manifest.outer, manifest.model.layers
    is_strided = outer.fragment_layout == "strided"
    rest = "one fragment for the rest" if is_strided else "embedding and last norm"
    most = layers + (1 if is_strided else 2)
    if manifest.model.task == "causal-lm" and outer.fragments > most:
        raise ConfigError(
            f"outer.fragments = {outer.fragments}: the {layers} blocks of model.layers and {rest} make "
            f"{most} at most; use fewer fragments or more layers"
        )


def of_rate(preset: str, manifest: Manifest, rounds: float, scale: Scale) -> str:
    """The sentence about an outer rate that is not the preset's own; empty where it is."""
    known = find_justification(preset)
    keys = {} if known is None else known.outer(rounds, scale.parameters)
    if known is None or not keys or manifest.outer.learning_rate != keys["learning_rate"]:
        return ""
    told = " and ".join(f"outer.{key} = {value:g}" for key, value in keys.items())
    return f"{told} for the run's {rounds:.0f} rounds: {known.why_rate}."


def next_step(manifest: Manifest, file: Path, data: Path | None) -> str:
    """Say what to type when the terms are written; a script's model is trained by that script."""
    if manifest.model.task == "custom":
        return f'train your own model with it, in a script: decentral.join("{file}", model, optimizer)'
    needs = "" if data is None else f" --data {shlex.quote(str(data))}"
    return f"start it with: decentral start {shlex.quote(str(file))}{needs}"
