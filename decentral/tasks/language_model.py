"""A small Llama over bytes, or a mixture of experts: 256 tokens, no tokenizer to download or to agree on.

Built from a ``transformers`` config, so what comes out of a run opens with ``AutoModelForCausalLM``. ``mixture`` says
what experts are.

Source: Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", 2023, arXiv:2302.13971.
"""

import json
import math
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, OlmoeConfig, OlmoeForCausalLM

from decentral.tasks.mixture import olmoe_config
from decentral.tasks.sizing import VOCAB, LanguageModelConfig

INIT_STD = 0.05  # held-out after 500 steps, hidden 128: 2.69 bits/byte; 2.84 with 0.02, 2.75 with 0.09


def transformers_config(config: LanguageModelConfig) -> LlamaConfig | OlmoeConfig:
    """The ``transformers`` config; its folder is what ``export`` writes."""
    shared = {
        "vocab_size": VOCAB,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.heads,
        "max_position_embeddings": config.context,
        "tie_word_embeddings": config.tie_embeddings,
        "use_cache": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "attn_implementation": "sdpa",
    }
    if config.experts is None:
        return LlamaConfig(**shared)
    return olmoe_config(shared, config)


def config_document(config: LanguageModelConfig) -> dict[str, Any]:
    """JSON of the config for a checkpoint's meta: ``export`` writes it as ``config.json``."""
    document = json.loads(transformers_config(config).to_json_string())
    return {**document, "architectures": [_architecture(config).__name__], "dtype": "float32"}


def build_language_model(config: LanguageModelConfig, *, seed: int) -> LlamaForCausalLM | OlmoeForCausalLM:
    """A freshly initialised model in float32 on the CPU; the same seed gives the same bits.

    Weights are drawn here, from one generator in the order of the names, so that a change of
    ``transformers``' own initialisation cannot make two peers start apart. The global generator is as
    before the call.
    """
    with torch.random.fork_rng(devices=[]):  # nn.Linear draws from it before we overwrite
        model: Any = _architecture(config)(transformers_config(config))  # Any: transformers ships no types
    initialise(model, torch.Generator().manual_seed(seed), num_layers=config.layers)
    return model


@torch.no_grad()
def initialise(model: nn.Module, generator: torch.Generator, *, num_layers: int) -> None:
    """Normal(0, 0.05) matrices, residual outputs smaller by sqrt(2 * layers), norms at one.

    Source of the residual scale: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            parameter.fill_(1.0)
            continue
        into_residual = name.removesuffix(".weight").endswith(("o_proj", "down_proj"))
        std = INIT_STD / math.sqrt(2 * num_layers) if into_residual else INIT_STD
        parameter.normal_(0.0, std, generator=generator)


def _architecture(config: LanguageModelConfig) -> Any:  # Any: as above
    return LlamaForCausalLM if config.experts is None else OlmoeForCausalLM
