"""The shape of the built-in language model with about so many parameters. Arithmetic; nothing is built.

Heads are 64 wide, or 32 in models too small for two of those; blocks are as many as make a model about as deep for its
width as published ones are: hidden / layers of 64 in GPT-3's 125M and 2.7B of 80, Llama's 7B 128.

Source of the shapes: Brown et al., "Language Models are Few-Shot Learners", 2020, table 2.1, arXiv:2005.14165; Touvron
et al., "LLaMA", 2023, table 2, arXiv:2302.13971.
"""

from __future__ import annotations

import math

from decentral.errors import ConfigError
from decentral.tasks.language_model import VOCAB, LanguageModelConfig

__all__ = ["config_of_size", "parameters_of"]

HEAD = 64
SMALL_HEAD = 32
WIDEST = 16_384
DEEPEST = 256
ASPECT = 64.0  # hidden / layers that is aimed at
OFF_SIZE, OFF_ASPECT = 40.0, 1.0  # what a doubling of the one costs beside a doubling of the other
TOLERANCE = 0.15  # of the size that was asked for


def config_of_size(num_parameters: int) -> LanguageModelConfig:
    """The config nearest to so many parameters, within 15 % of them. Raises ConfigError when none is."""
    found = min(_candidates(num_parameters), key=lambda config: _cost(config, num_parameters))
    if abs(parameters_of(found) / num_parameters - 1) > TOLERANCE:
        raise ConfigError(
            f"model of {num_parameters:,} parameters: the built-in language model has from "
            f"{_smallest():,} to some {_largest() / 1e9:.0f}B; take a size between them, or --task custom"
        )
    return found


def parameters_of(config: LanguageModelConfig) -> int:
    """Parameters of a model without experts, its tied embedding once."""
    hidden, intermediate = config.hidden, config.intermediate
    block = 4 * hidden**2 + 3 * hidden * intermediate + 2 * hidden
    return VOCAB * hidden + config.layers * block + hidden


def _candidates(num_parameters: int) -> list[LanguageModelConfig]:
    """Of every width the two depths around the size."""
    found = []
    for hidden in (SMALL_HEAD, *range(HEAD, WIDEST + 1, HEAD)):
        head = HEAD if hidden > HEAD else SMALL_HEAD
        one = LanguageModelConfig(hidden=hidden, layers=1, heads=hidden // head)
        two = parameters_of(LanguageModelConfig(hidden=hidden, layers=2, heads=hidden // head))
        depth = 1 + (num_parameters - parameters_of(one)) / (two - parameters_of(one))
        for layers in {math.floor(depth), math.ceil(depth)}:
            if depth > 0:
                fits = min(DEEPEST, max(1, layers))
                found.append(LanguageModelConfig(hidden=hidden, layers=fits, heads=hidden // head))
    return found or [LanguageModelConfig(hidden=SMALL_HEAD, layers=1, heads=1)]


def _cost(config: LanguageModelConfig, num_parameters: int) -> float:
    off_size = abs(math.log2(parameters_of(config) / num_parameters))
    off_aspect = abs(math.log2(config.hidden / config.layers / ASPECT))
    return OFF_SIZE * off_size + OFF_ASPECT * off_aspect


def _smallest() -> int:
    return parameters_of(LanguageModelConfig(hidden=SMALL_HEAD, layers=1, heads=1))


def _largest() -> int:
    return parameters_of(LanguageModelConfig(hidden=WIDEST, layers=DEEPEST, heads=WIDEST // HEAD))
