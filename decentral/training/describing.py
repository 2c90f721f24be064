"""What a checkpoint says of a model so that ``export`` can write a folder that others open."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from torch import nn

from decentral.state.adapters import described


def description_of(bare: nn.Module, trained: Iterable[str]) -> dict[str, Any] | None:  # Any: JSON
    """A transformers configuration, adapters of peft by theirs; None for a model that only its script can build."""
    if type(bare).__module__.startswith("peft."):
        return _of_adapters(bare, trained)
    config = getattr(bare, "config", None)
    if config is None or not hasattr(config, "to_json_string"):
        return None
    if any(".base_layer." in name for name, _ in bare.named_parameters()):
        return None  # adapters that transformers put in: its folder would be opened without them
    document = json.loads(config.to_json_string())
    is_theirs = type(bare).__module__.startswith("transformers.")
    if is_theirs and not document.get("architectures"):  # they write it when they save a model, as nobody did here
        document["architectures"] = [type(bare).__name__]
    return {"task": "causal-lm", "config": document}


def _of_adapters(bare: Any, trained: Iterable[str]) -> dict[str, Any] | None:  # Any: peft may not be here
    active = bare.active_adapter
    if not isinstance(active, str):  # several at once
        return None
    found = described(bare.peft_config[active].to_dict(), active, trained)
    return None if found is None else dict(json.loads(json.dumps(found, default=str)))
