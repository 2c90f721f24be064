"""The model and the terms of a demo, and the built-in language model in a size that was asked for."""

import subprocess
import sys
from typing import Any

import pytest
import torch

from decentral.compressors import parse_compressor
from decentral.errors import ConfigError
from decentral.manifest import preset_manifest
from decentral.manifest.presets import check_methods
from decentral.optimizers import presets
from decentral.parameters import schema_of
from decentral.tasks.language_model import LanguageModel, build_language_model
from decentral.tasks.sizing import (
    DEMO_INNER,
    DEMO_MODEL,
    LanguageModelConfig,
    config_of_size,
    demo_tables,
    parameters_of,
)

PEERS = 4


@pytest.mark.parametrize("method", sorted(presets()))
def test_the_demo_of_every_method_is_a_valid_manifest(method):
    manifest = preset_manifest(method, **demo_tables(method))
    check_methods(manifest)
    own = presets()[method].demo
    assert manifest.model.hidden == {**DEMO_MODEL, **own.get("model", {})}["hidden"]
    if method != "just_one_byte":  # which learns fast where parameters are few
        assert 500_000 <= parameters_of(LanguageModelConfig.of(manifest.model)) <= 800_000, "all take about as long"
    assert manifest.inner.clip == {**DEMO_INNER, **own.get("inner", {})}["clip"]


def test_the_tables_are_copies_that_a_caller_may_change():
    demo_tables("diloco")["inner"]["steps"] = 1
    assert preset_manifest("diloco", **demo_tables("diloco")).inner.steps == 25


def test_the_sparse_frames_leave_a_fifth_of_the_promised_reduction_for_the_protocol():
    manifest = preset_manifest("sparseloco", **demo_tables("sparseloco"))
    (fragment,) = schema_of(build_language_model(LanguageModelConfig(**DEMO_MODEL), seed=0)).fragments
    compressor = parse_compressor(manifest.compressor.chain)
    frame_nbytes = sum(part.nbytes for shape in fragment.shapes for part in compressor.layout(shape))
    sent_per_step = frame_nbytes * (PEERS - 1) / manifest.inner.steps  # everybody's frame reaches everybody
    dense_per_step = 2 * (PEERS - 1) / PEERS * 4 * fragment.numel  # a ring all-reduce of float32 gradients
    assert dense_per_step / sent_per_step > 500 * 1.2


def test_reading_the_presets_does_not_load_torch():
    code = "import sys, decentral.tasks.sizing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- sizes ----


@pytest.mark.parametrize("asked", [100_000, 635_776, 10**6, 3 * 10**7, 125 * 10**6, 10**9, 7 * 10**9])
def test_a_model_of_about_that_size_and_of_a_usual_shape(asked: int) -> None:
    config = config_of_size(asked)
    assert parameters_of(config) == pytest.approx(asked, rel=0.05)
    assert parameters_of(config) == _built(config)
    if asked >= 10**7:
        assert 30 < config.hidden / config.layers < 130


@pytest.mark.parametrize("given", [{"experts": 4, "experts_per_token": 2}, {"experts": 8}, {"tie_embeddings": False}])
def test_experts_and_a_head_of_its_own_are_counted_as_they_are_built(given: dict[str, Any]) -> None:
    config = LanguageModelConfig(hidden=96, layers=3, heads=3, **given)
    assert parameters_of(config) == _built(config)


def _built(config: LanguageModelConfig) -> int:
    """Parameters of the model itself, which takes no memory on torch's device ``meta``."""
    with torch.device("meta"):
        model = LanguageModel(config)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("asked", "nearest"), [(1000, "21600"), (30_000, "21600 or 34976"), (10**14, r"\d{12}")], ids=str
)
def test_sizes_that_it_cannot_have_are_refused_with_those_beside_them(asked: int, nearest: str) -> None:
    with pytest.raises(ConfigError, match=rf"none of that size; take {nearest}, or --task custom"):
        config_of_size(asked)
