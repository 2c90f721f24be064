"""Turn a checkpoint into a model folder: ``model.safetensors``, and ``config.json`` where the task gave one.

What is exported is the anchor, the parameters all peers share after the last commit: it evaluates better
than any single peer's live copy (Streaming DiLoCo, arXiv:2501.18512, 2.67 against 2.77 at 500M). With a
causal-lm task the folder opens with ``AutoModelForCausalLM.from_pretrained``. The checkpoint's meta must
hold ``parameters`` (``Schema.to_json()``); ``model`` = {"task": "causal-lm", "config": {...}} adds the config.
"""

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from decentral.errors import ConfigError, DiskError, PayloadError, UsageError
from decentral.parameters import Schema, split
from decentral.state.checkpoint import Checkpoint, load_newest
from decentral.state.durable import DISK, TEMPORARY, disk_errors
from decentral.state.snapshot import anchor_name
from decentral.state.tensor_file import write_tensor_file


def export(checkpoints: Path, to: Path) -> Checkpoint:
    """Write the newest valid checkpoint's anchor as a model folder ``to``; returns the checkpoint used.

    Raises:
        UsageError: ``to`` exists already and is not an empty folder.
        DiskError: no valid checkpoint, or ``to`` cannot be written; no partial folder stays.
        ConfigError: the checkpoint holds no anchor of a model.

    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UsageError(f"{to} exists and is not an empty folder; name another with --to")
    checkpoint = load_newest(checkpoints)
    if checkpoint is None:
        raise DiskError(f"no checkpoint in {checkpoints}; train until one is written, or check the folder")
    parameters = anchor_parameters(checkpoint)
    with disk_errors(f"writing the model to {to}"):
        _write(to, parameters, checkpoint.meta.get("model") or {})
    return checkpoint


def anchor_parameters(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Named parameters of the anchor in the model's shapes, float32."""
    try:
        schema = Schema.from_json(checkpoint.meta["parameters"])
        flats = {f.index: checkpoint.tensors[anchor_name(f.index)] for f in schema.fragments}
    except (KeyError, TypeError, ConfigError, PayloadError) as error:
        raise ConfigError(f"{checkpoint.path} holds no anchor of a run ({error}); name another folder") from error
    parameters: dict[str, Tensor] = {}
    for fragment in schema.fragments:
        names = (parameter.name for parameter in fragment.parameters)
        parameters |= dict(zip(names, split(flats[fragment.index], fragment), strict=True))
    return parameters


def _write(to: Path, parameters: dict[str, Tensor], model: dict[str, Any]) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    temporary = to.with_name(f"{TEMPORARY}{to.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        DISK.make_folder(temporary)
        write_tensor_file(temporary / "model.safetensors", parameters, {"format": "pt"})
        if model.get("task") == "causal-lm":
            config = json.dumps(model["config"], indent=2, sort_keys=True) + "\n"
            DISK.write(temporary / "config.json", [config.encode()])
        DISK.sync_folder(temporary)
        with contextlib.suppress(FileNotFoundError):
            to.rmdir()  # an empty folder, checked above
        DISK.rename(temporary, to)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    DISK.sync_folder(to.parent)
