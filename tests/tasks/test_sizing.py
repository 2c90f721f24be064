"""The built-in language model in a size that was asked for."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from decentral.errors import ConfigError
from decentral.tasks.language_model import transformers_config
from decentral.tasks.sizing import LanguageModelConfig, config_of_size, parameters_of


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
        model = AutoModelForCausalLM.from_config(transformers_config(config))
    return sum(parameter.numel() for parameter in model.parameters())


def test_sizes_that_it_cannot_have_are_refused_with_those_that_it_can() -> None:
    for asked in (1000, 10**14):
        with pytest.raises(ConfigError, match=r"the built-in language model has from 21,600 to some 825B; take"):
            config_of_size(asked)
