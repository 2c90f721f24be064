"""A base model with the adapters that a run trained, as one model: the base from its folder, the adapters from the run.

peft puts them together; they are then added to the base's weights, so that what follows sees a usual model.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

from decentral.errors import DiskError, UsageError
from decentral.state.checkpoint import ADAPTER, ADAPTER_CONFIG
from decentral.state.export import export

BASE = "base_model_name_or_path"  # in peft's configuration: where the base was when it was trained


def of_run(checkpoints: Path, base: Path | None) -> tuple[Any, Path]:
    """The newest checkpoint's adapters on their base, and the base's folder. Raises UsageError, DiskError."""
    with tempfile.TemporaryDirectory(prefix="decentral-") as folder:
        adapters = Path(folder) / "adapters"
        export(checkpoints, adapters)
        return of_folder(adapters, base)


def of_folder(adapters: Path, base: Path | None) -> tuple[Any, Path]:
    """The adapters of a folder, as peft saves them, on their base, and the base's folder."""
    if importlib.util.find_spec("peft") is None:
        raise UsageError(f"{adapters} holds adapters, which take peft to open; pip install 'decentral[lora]'")
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    place = base or _base_of(adapters)
    if place is None:
        raise UsageError("what was trained are adapters, and their base is not in the folder: name its own with --base")
    try:
        module = AutoModelForCausalLM.from_pretrained(place, local_files_only=True, use_safetensors=True)
        return PeftModel.from_pretrained(module, str(adapters), local_files_only=True).merge_and_unload(), place
    except (ValueError, KeyError, OSError, RuntimeError) as error:
        why = str(error).strip().split("\n", 1)[0]
        raise UsageError(f"{place} is no base that these adapters fit: {why}; name another one with --base") from error


def is_adapters(folder: Path) -> bool:
    """Whether ``folder`` is what peft saves, or ``decentral export`` of such a run."""
    return (folder / ADAPTER).is_file() and (folder / ADAPTER_CONFIG).is_file()


def _base_of(adapters: Path) -> Path | None:
    """Where the base was, if that is a folder here; a name of a hub is fetched by nobody."""
    try:
        named = json.loads((adapters / ADAPTER_CONFIG).read_text(encoding="utf-8")).get(BASE)
    except (OSError, ValueError, AttributeError) as error:
        raise DiskError(f"{adapters / ADAPTER_CONFIG} cannot be read ({type(error).__name__})") from error
    place = Path(named) if isinstance(named, str) and named else None
    return place if place is not None and (place / "config.json").is_file() else None
