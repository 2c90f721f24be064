"""A small Llama over bytes, or a mixture of experts: 256 tokens, no tokenizer to download or to agree on.

Built from a ``transformers`` config, so what comes out of a run opens with ``AutoModelForCausalLM``.

Source: Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", 2023, arXiv:2302.13971.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, OlmoeConfig, OlmoeForCausalLM

from decentral.errors import ConfigError, UsageError
from decentral.state.export import CONFIG, MODEL, PACKED
from decentral.tasks.sizing import VOCAB, LanguageModelConfig

INIT_STD = 0.05  # held-out after 500 steps, hidden 128: 2.69 bits/byte; 2.84 with 0.02, 2.75 with 0.09


def transformers_config(config: LanguageModelConfig) -> LlamaConfig | OlmoeConfig:
    """Return the ``transformers`` config; its folder is what ``export`` writes."""
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


def build_language_model(config: LanguageModelConfig, *, seed: int) -> LlamaForCausalLM | OlmoeForCausalLM:
    """Return a freshly initialised model in float32 on the CPU; the same seed gives the same bits.

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
    """Draw Normal(0, 0.05) matrices, residual outputs smaller by sqrt(2 * layers), norms at one.

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


# ---- a mixture of experts ----
#
# It takes an MLP's place in every block: of E experts each byte goes to the k likeliest.
#
# p = softmax(W*x) ;  y = sum over the k largest p_e of p_e/s * expert_e(x) ;  s = their sum for k > 1, and 1 for k = 1
# loss = cross entropy + 0.01*E*sum over e of f_e*P_e ;  f_e = choices of e for each byte, P_e = mean of p_e
#
# The second term holds the load of the experts even. It is 0.01*k where they are used alike, and that much the
# training loss is told too high; held-out losses leave it out. f and P are means over all blocks together, as
# ``transformers`` has it. No noise and no capacity: the same parameters and bytes go the same way, and none is
# dropped. With k = 1 the likeliest is not divided by itself, or the router would learn from nothing but the balance.
#
# An expert is 1/k as wide as the MLP of a Llama of the same size, so that a byte costs as much. The experts of a block
# are one tensor, ``layers.0.mlp.experts.gate_up_proj``, whose first dimension counts them: there methods look for
# them.
#
# Source: Muennighoff et al., "OLMoE: Open Mixture-of-Experts Language Models", 2024, arXiv:2409.02060; the balance:
# Fedus, Zoph and Shazeer, "Switch Transformers", 2021, arXiv:2101.03961, equations 4 to 6, with their alpha.

BALANCE_WEIGHT = 0.01
# An inner step of 690,528 parameters, one core: a loop over experts 82 ms, grouped_mm 145, batched_mm 1880.
_LOOP = "eager"


def olmoe_config(shared: Mapping[str, Any], config: LanguageModelConfig) -> OlmoeConfig:  # Any: keys of theirs
    """Return the ``transformers`` config of a mixture, from what it has in common with the Llama of its size."""
    return OlmoeConfig(
        **{**shared, "intermediate_size": config.expert_width},
        num_experts=config.experts,
        num_experts_per_tok=config.experts_per_token,
        norm_topk_prob=config.experts_per_token > 1,
        output_router_logits=True,
        router_aux_loss_coef=BALANCE_WEIGHT,
        experts_implementation=_LOOP,
    )


# ---- weights put into a model ----
#
# Tensors by their names, and those of a model folder to begin a run from.

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
        raise UsageError(
            f"--from {folder} is packed; unpack it with decentral export {shlex.quote(str(folder))} --to FOLDER"
        )
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
    """Return the end of the message: what [model] would have to say."""
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    sizes = ", ".join(f"{ours} = {config[theirs]}" for ours, theirs in _SIZES.items() if theirs in config)
    return f"; its folder says [model] {sizes}" if sizes else ""
