"""Tensors into a model by their names, and those of a model folder to begin a run from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from decentral.errors import ConfigError, UsageError
from decentral.state.export import CONFIG, MODEL, PACKED

_SIZES = {  # of the manifest's [model], and how transformers' configurations call them
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "context": "max_position_embeddings",
    "experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
}


def put_in(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite all of a model's parameters and kept buffers in place, each in its own dtype and on its own device.

    Tied ones are needed once. ConfigError, which names a tensor, unless every one is there and fits; nothing was
    written then.
    """
    named = module.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        if name not in named:
            raise ConfigError(f"{name} {tuple(tensor.shape)} is no tensor of this model")
        if named[name].shape != tensor.shape:
            raise ConfigError(f"{name} is {tuple(tensor.shape)}, and {tuple(named[name].shape)} in this model")
    written = {id(named[name]) for name in tensors}
    missing = [name for name, tensor in named.items() if id(tensor) not in written]
    if missing:
        raise ConfigError(f"{missing[0]} {tuple(named[missing[0]].shape)} of this model is missing")
    with torch.no_grad():
        for name, tensor in tensors.items():
            named[name].copy_(tensor)


def begin_from(folder: Path, module: nn.Module) -> None:
    """Give the built-in model the weights of a model folder, as ``export`` writes it.

    UsageError where there is none, ConfigError for one of another model: it says which terms would fit.
    """
    if (folder / PACKED).is_file():
        raise UsageError(f"--from {folder} is packed; unpack it with decentral export {folder} --to FOLDER")
    if not (folder / MODEL).is_file():
        raise UsageError(f"--from {folder}: no {MODEL} there; name a folder that decentral export wrote")
    try:
        tensors = load_file(folder / MODEL)
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(f"--from {folder}: {MODEL} cannot be read ({error})") from error
    try:
        put_in(module, tensors)
    except ConfigError as error:
        raise ConfigError(f"--from {folder} is another model than the run's: {error}{_terms_of(folder)}") from error


def _terms_of(folder: Path) -> str:
    """The end of the message: what [model] would have to say."""
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    sizes = ", ".join(f"{ours} = {config[theirs]}" for ours, theirs in _SIZES.items() if theirs in config)
    return f"; its folder says [model] {sizes}" if sizes else ""
