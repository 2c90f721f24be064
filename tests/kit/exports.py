"""A small model and the run directory of a peer that was kept."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from decentral.manifest import preset_manifest
from decentral.state.checkpoint import save
from decentral.state.snapshot import anchor_name
from decentral.tasks.language_model import build_language_model
from decentral.tasks.sizing import LanguageModelConfig
from decentral.training.live_model import LiveModel, description_of


def kept(folder: Path, model: nn.Module, task: str) -> None:
    """A run directory with one checkpoint of ``model``."""
    live = LiveModel(model, 1, None)
    tensors = {anchor_name(f): flat for f, flat in enumerate(live.read_all())} | live.buffers.copies()
    folder.mkdir()
    (folder / "run.toml").write_text(preset_manifest("sparseloco", model={"task": task}).to_toml())
    meta = {"parameters": live.schema.to_json(), "model": description_of(live.bare, live.trained), "buffers": "own"}
    save(folder / "checkpoints", "round-1", tensors, meta)


def small_model(experts: int | None = None) -> nn.Module:
    config = LanguageModelConfig(hidden=16, layers=1, heads=2, context=32, experts=experts)
    model: nn.Module = build_language_model(config, seed=0)
    return model
