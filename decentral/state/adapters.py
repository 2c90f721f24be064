"""Adapters of peft on a frozen base: what a checkpoint says of them, and the files by which peft opens them.

The base stays where it came from, so the export of such a run is what was trained. In a model a parameter carries the
name of its adapter (``...q_proj.lora_A.default.weight``), in peft's files it does not (``...q_proj.lora_A.weight``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

TASK = "adapter"  # of the model, in a checkpoint's meta
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"


def saved_name(name: str, adapter: str) -> str | None:
    """A parameter's name in peft's file; None for one of no adapter whose files have such names."""
    copied = f".modules_to_save.{adapter}."  # a module of the base that is trained whole
    if copied in name:
        return name.replace(copied, ".")
    before, found, after = name.partition(f".{adapter}")
    is_whole = found and (not after or after.startswith("."))
    return before + after if is_whole and ".lora_" in before else None


def described(config: Mapping[str, Any], adapter: str, trained: Iterable[str]) -> dict[str, Any] | None:  # Any: JSON
    """For a checkpoint's meta; None where something is trained that such an adapter's files have no place for."""
    if any(saved_name(name, adapter) is None for name in trained):
        return None
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    return {"task": TASK, "adapter": adapter, "config": {**plain, "inference_mode": True}}
