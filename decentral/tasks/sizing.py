"""The shape of the built-in language model, and the one with about so many parameters; numbers that go with it.

Arithmetic, and the ``config.json`` of such a model; nothing is built. Heads are 64 wide, or 32 in models too small for
two of those; blocks are as many as make a model about as deep for its width as published ones are: hidden / layers of
64 in GPT-3's 125M and 2.7B of 80, Llama's 7B 128.

Source of the shapes: Brown et al., "Language Models are Few-Shot Learners", 2020, table 2.1, arXiv:2005.14165; Touvron
et al., "LLaMA", 2023, table 2, arXiv:2302.13971.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

from decentral.errors import ConfigError
from decentral.manifest.terms import EXPERTS_PER_TOKEN, INNER_OPTIMIZERS, Model

VOCAB = 256  # every byte is a token; already a multiple of 64
HEAD = 64
SMALL_HEAD = 32
WIDEST = 16_384
DEEPEST = 256
ASPECT = 64.0  # hidden / layers that is aimed at
OFF_SIZE, OFF_ASPECT = 40.0, 1.0  # what a doubling of the one costs beside a doubling of the other
TOLERANCE = 0.15  # of the size that was asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModelConfig:
    """Size of the model; about layers * 12 * hidden**2 parameters, and 256 * hidden for the embedding."""

    hidden: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 128  # bytes the model sees at once
    tie_embeddings: bool = True
    experts: int | None = None  # per block; None: one MLP
    experts_per_token: int = EXPERTS_PER_TOKEN  # that a byte goes to

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "context", "experts_per_token"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name} = {getattr(self, name)}: must be at least 1")
        if self.experts is not None and self.experts < self.experts_per_token:
            raise ConfigError(f"model.experts = {self.experts}: each byte goes to {self.experts_per_token} of them")
        if self.hidden % (2 * self.heads):
            raise ConfigError(
                f"model.hidden = {self.hidden} with heads = {self.heads}: hidden must be a multiple of "
                f"2 * heads = {2 * self.heads}, because rotary positions turn pairs of channels"
            )

    @classmethod
    def of(cls, terms: Model) -> LanguageModelConfig:
        """Return the size of the model that a manifest describes."""
        return cls(
            hidden=terms.hidden,
            layers=terms.layers,
            heads=terms.heads,
            context=terms.context,
            experts=terms.experts,
            experts_per_token=terms.experts_of_a_token,
            tie_embeddings=terms.tied is not False,
        )

    @property
    def intermediate(self) -> int:
        """Return the width of the gated MLP: 8/3 of hidden, rounded up to a multiple of 32."""
        return math.ceil(self.hidden * 8 / 3 / 32) * 32

    @property
    def expert_width(self) -> int:
        """Return the width of one expert: all that a byte goes to are as wide as the MLP, rounded up to multiples of
        32.
        """
        return math.ceil(self.intermediate / self.experts_per_token / 32) * 32


def config_of_size(num_parameters: int) -> LanguageModelConfig:
    """Return the config nearest to so many parameters, within 15 % of them. Raises ConfigError when none is."""
    found = min(_candidates(num_parameters), key=lambda config: _cost(config, num_parameters))
    if abs(parameters_of(found) / num_parameters - 1) > TOLERANCE:
        sizes = sorted({parameters_of(config) for config in _candidates(num_parameters)})
        below = [size for size in sizes if size <= num_parameters][-1:]
        above = [size for size in sizes if size > num_parameters][:1]
        raise ConfigError(
            f"model of {num_parameters:,} parameters: the built-in language model has none of that size; take "
            f"{' or '.join(map(str, below + above))}, or --task custom"
        )
    return found


def parameters_of(config: LanguageModelConfig) -> int:
    """Count the parameters of such a model, tied ones once; a test holds it to what is built."""
    hidden, embedding = config.hidden, VOCAB * config.hidden
    heads = 0 if config.tie_embeddings else embedding
    return embedding + config.layers * (4 * hidden**2 + 2 * hidden + _mlp(config)) + hidden + heads


def _mlp(config: LanguageModelConfig) -> int:
    """Count a block's gated MLP; or its experts, their router, and the norms that OLMoE has of queries and keys."""
    if config.experts is None:
        return 3 * config.hidden * config.intermediate
    return config.experts * (3 * config.hidden * config.expert_width + config.hidden) + 2 * config.hidden


def _candidates(num_parameters: int) -> list[LanguageModelConfig]:
    """Return for every width the two depths around the size."""
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


# ---- its config.json ----
#
# As ``transformers`` writes and reads it. The model is built of what it says.

LLAMA = "llama"
BALANCE_WEIGHT = 0.01  # of a mixture: see language_model
SIZES = {  # of the manifest's [model], and how transformers' configurations call them
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "context": "max_position_embeddings",
    "experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
}


class ModelConfig(SimpleNamespace):
    """A model's ``config.json`` as attributes."""

    def to_json_string(self) -> str:
        """Write it."""
        return json.dumps(vars(self))


def folder_config(config: LanguageModelConfig) -> dict[str, Any]:  # Any: JSON
    """Return the ``config.json`` of such a model: all that its meaning hangs on, and no default of somebody's."""
    shared = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "hidden_act": "silu",
        "hidden_size": config.hidden,
        "initializer_range": 0.02,
        "max_position_embeddings": config.context,
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": config.heads,
        "pad_token_id": None,
        "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
        "tie_word_embeddings": config.tie_embeddings,
        "use_cache": False,
        "vocab_size": VOCAB,
    }
    if config.experts is None:
        return shared | {
            "architectures": ["LlamaForCausalLM"],
            "head_dim": config.hidden // config.heads,
            "intermediate_size": config.intermediate,
            "mlp_bias": False,
            "model_type": LLAMA,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-6,
        }
    return shared | {
        "architectures": ["OlmoeForCausalLM"],
        "clip_qkv": None,
        "intermediate_size": config.expert_width,
        "model_type": "olmoe",
        "norm_topk_prob": config.experts_per_token > 1,
        "num_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token,
        "output_router_logits": True,
        "rms_norm_eps": 1e-5,
        "router_aux_loss_coef": BALANCE_WEIGHT,
    }


def built_in(document: Mapping[str, Any]) -> LanguageModelConfig | None:
    """Return the size of the built-in model that a ``config.json`` is of; None where it is of another model."""
    sizes = {ours: document[theirs] for ours, theirs in SIZES.items() if theirs in document}
    try:
        found = LanguageModelConfig(**sizes, tie_embeddings=document["tie_word_embeddings"])
    except (KeyError, TypeError, ConfigError):
        return None
    told = {name: value for name, value in document.items() if name != "transformers_version"}
    as_text = {json.dumps(one, sort_keys=True) for one in (told, folder_config(found))}  # 16.0 is no 16
    return found if len(as_text) == 1 else None


# ---- the demo's numbers ----
#
# Spelled as tables of a manifest: ``preset_manifest(method, **demo_tables(method))``. How each was chosen:
# experiments/demo_tuning/README.md.

Tables = dict[str, dict[str, Any]]  # Any: values of every key

# 635,776 parameters, 50 to 60 ms per inner step on one core of a 2020s server when nothing else runs.
DEMO_MODEL: Final[dict[str, int]] = {"hidden": 128, "layers": 3, "heads": 4, "context": 128}

# AdamW at the rate where the solo baseline itself is best, so that the swarm does not win by a bad baseline.
DEMO_INNER: Final[dict[str, Any]] = {"learning_rate": 1e-3, "weight_decay": 0.1, "warmup": 20, "clip": 1.0}
_ADAMW: Final = INNER_OPTIMIZERS["adamw"].keys
DEMO_BETAS: Final[tuple[float, float]] = (_ADAMW["beta1"], _ADAMW["beta2"])
DEMO_BATCH_SIZE: Final[int] = 4

DEMO_STEPS: Final[int] = 25  # H, inner steps per round: 4 to 6 s with all peers on two cores


def demo_tables(method: str) -> Tables:
    """Return what the demo changes in the preset of this name: what all share, then what the preset says of a demo."""
    from decentral.optimizers import presets  # torch

    chosen = presets().get(method)
    own = {} if chosen is None else chosen.demo
    inner = {"steps": DEMO_STEPS, **DEMO_INNER}
    shared: Tables = {"model": dict(DEMO_MODEL), "data": {"batch_size": DEMO_BATCH_SIZE}, "inner": inner}
    return {table: {**shared.get(table, {}), **own.get(table, {})} for table in [*shared, *(own.keys() - shared)]}
