"""A small Llama over bytes, or a mixture of experts: 256 tokens, no tokenizer to download or to agree on.

Plain torch, with the parameters of ``transformers``' LlamaForCausalLM and OlmoeForCausalLM, so that what comes out of a
run opens with ``AutoModelForCausalLM``. Outputs and gradients are theirs, which a test holds where they are installed.

Source: Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", 2023, arXiv:2302.13971; positions: Su et
al., "RoFormer", 2021, arXiv:2104.09864.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, one_hot, pad, scaled_dot_product_attention, silu

from decentral.errors import ConfigError, UsageError
from decentral.state.export import CONFIG, MODEL, PACKED
from decentral.tasks.sizing import BALANCE_WEIGHT, LLAMA, SIZES, VOCAB, LanguageModelConfig, ModelConfig, folder_config

# Shape suffixes: B = windows of a batch, T = tokens of one, N = B*T, D = width, H = heads, K = width of a head,
# V = vocabulary, E = experts, C = those that a token goes to, M = tokens of one expert.

INIT_STD = 0.05  # held-out after 500 steps, hidden 128: 2.69 bits/byte; 2.84 with 0.02, 2.75 with 0.09
_UNSEEN = -100  # a label that the loss leaves out


def build_language_model(config: LanguageModelConfig, *, seed: int) -> LanguageModel:
    """Return a freshly initialised model in float32 on the CPU; the same seed gives the same bits.

    Weights are drawn from one generator in the order of the names. The global generator is as before the call.
    """
    with torch.random.fork_rng(devices=[]):  # nn.Linear draws from it before we overwrite
        model = LanguageModel(config)
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


class Output(NamedTuple):
    """Answer of a causal language model; models of ``transformers`` have the same names, and more."""

    loss: Tensor | None  # nats per token, where labels were given
    logits: Tensor  # (B, T, V)
    aux_loss: Tensor | None = None  # of a mixture: how uneven the load of its experts is
    router_logits: tuple[Tensor, ...] | None = None  # of a mixture: (N, E) of every block


class LanguageModel(nn.Module):
    """Causal language model, called as those of ``transformers`` are."""

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        self.config = ModelConfig(**folder_config(config))
        self.model = _Decoder(self.config)
        self.lm_head = nn.Linear(config.hidden, VOCAB, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def get_output_embeddings(self) -> nn.Module:
        """Return the head."""
        return self.lm_head

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        """Foretell from ``input_ids`` (B, T) each next token; ``labels``: the same, for a loss."""
        hidden_BTD, routed = self.model(input_ids)
        logits_BTV = self.lm_head(hidden_BTD)
        loss = None if labels is None else self.loss(logits_BTV, labels)
        if not routed:
            return Output(loss, logits_BTV)
        uneven = balance(routed, self.config.num_experts_per_tok)
        return Output(None if loss is None else loss + BALANCE_WEIGHT * uneven, logits_BTV, uneven, tuple(routed))

    @staticmethod
    def loss(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
        """Return nats per token of ``labels_BT``, the tokens that ``logits_BTV`` were made from."""
        next_BT = pad(labels_BT, (0, 1), value=_UNSEEN)[:, 1:]  # the last token has none
        return cross_entropy(logits_BTV.float().flatten(0, 1), next_BT.flatten(), ignore_index=_UNSEEN)

    def segments(self) -> list[tuple[Callable[[Tensor], Tensor], tuple[nn.Module, ...]]]:
        """Return the model in pieces that run one after the other, each with its modules: a machine may train some.

        ConfigError for a mixture, whose blocks share one balance.
        """
        if self.config.model_type != LLAMA:
            raise ConfigError("a mixture balances the experts of all its blocks together: it cannot be cut into stages")
        blocks = [(self.model.run(block), (block,)) for block in self.model.layers]
        head = (self.model.norm, self.lm_head)
        return [
            (self.model.embed_tokens, (self.model.embed_tokens,)),
            *blocks,
            (lambda hidden_BTD: self.lm_head(self.model.norm(hidden_BTD)), head),
        ]


class _Decoder(nn.Module):
    """Blocks between the embedding and the head."""

    inverse_K: Tensor  # angles by which a position turns, half as many as a head is wide

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, config.hidden_size)
        self.layers = nn.ModuleList(_Block(config) for _ in range(config.num_hidden_layers))
        self.norm = _Norm(config)
        width = config.hidden_size // config.num_attention_heads
        share_K = torch.arange(0, width, 2, dtype=torch.float32, device=torch.get_default_device()) / width
        self.register_buffer("inverse_K", 1.0 / config.rope_parameters["rope_theta"] ** share_K, persistent=False)

    def forward(self, tokens_BT: Tensor) -> tuple[Tensor, list[Tensor]]:
        hidden_BTD = self.embed_tokens(tokens_BT)
        turn = self._turn(hidden_BTD)
        routed: list[Tensor] = []
        for block in self.layers:
            hidden_BTD, logits_NE = block(hidden_BTD, turn)
            routed += [] if logits_NE is None else [logits_NE]
        return self.norm(hidden_BTD), routed

    def run(self, block: nn.Module) -> Callable[[Tensor], Tensor]:
        """Return one of its blocks as a function of hidden states alone."""
        return lambda hidden_BTD: block(hidden_BTD, self._turn(hidden_BTD))[0]

    @torch.no_grad()
    def _turn(self, hidden_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines (T, K) of the positions."""
        position_T = torch.arange(hidden_BTD.shape[1], dtype=torch.float32, device=hidden_BTD.device)
        angle_TK = (position_T[:, None] * self.inverse_K.float()).repeat(1, 2)
        return angle_TK.cos().to(hidden_BTD.dtype), angle_TK.sin().to(hidden_BTD.dtype)


class _Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _MLP(config) if config.model_type == LLAMA else _Mixture(config)
        self.input_layernorm, self.post_attention_layernorm = _Norm(config), _Norm(config)

    def forward(self, hidden_BTD: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
        hidden_BTD = hidden_BTD + self.self_attn(self.input_layernorm(hidden_BTD), turn)
        out_BTD, logits_NE = self.mlp(self.post_attention_layernorm(hidden_BTD))
        return hidden_BTD + out_BTD, logits_NE


class _Norm(nn.Module):
    """RMSNorm: x / sqrt(mean(x^2) + eps) * weight, in float32."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight, self._eps = nn.Parameter(_room(config.hidden_size).fill_(1.0)), config.rms_norm_eps

    def forward(self, hidden: Tensor) -> Tensor:
        exact = hidden.float()
        size = exact.pow(2).mean(-1, keepdim=True)
        return self.weight * (exact * torch.rsqrt(size + self._eps)).to(hidden.dtype)


class _Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, self._heads = config.hidden_size, config.num_attention_heads
        self.q_proj, self.k_proj = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.v_proj, self.o_proj = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.q_norm, self.k_norm = (nn.Identity() if config.model_type == LLAMA else _Norm(config) for _ in range(2))

    def forward(self, hidden_BTD: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        query_BHTK = _turn_pairs(self._by_heads(self.q_norm(self.q_proj(hidden_BTD))), turn)
        key_BHTK = _turn_pairs(self._by_heads(self.k_norm(self.k_proj(hidden_BTD))), turn)
        value_BHTK = self._by_heads(self.v_proj(hidden_BTD))
        mixed_BHTK = scaled_dot_product_attention(query_BHTK, key_BHTK, value_BHTK, is_causal=True)
        out_BTD: Tensor = self.o_proj(mixed_BHTK.transpose(1, 2).flatten(2))
        return out_BTD

    def _by_heads(self, projected_BTD: Tensor) -> Tensor:
        return projected_BTD.view(*projected_BTD.shape[:2], self._heads, -1).transpose(1, 2)


def _turn_pairs(heads_BHTK: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    first, second = heads_BHTK.chunk(2, dim=-1)
    return heads_BHTK * turn[0] + torch.cat((-second, first), dim=-1) * turn[1]


class _MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        outer, inner = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj = nn.Linear(outer, inner, bias=False), nn.Linear(outer, inner, bias=False)
        self.down_proj = nn.Linear(inner, outer, bias=False)

    def forward(self, hidden_BTD: Tensor) -> tuple[Tensor, None]:
        return self.down_proj(silu(self.gate_proj(hidden_BTD)) * self.up_proj(hidden_BTD)), None


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


class _Mixture(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._chosen, self._norms = config.num_experts_per_tok, config.norm_topk_prob
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = _Experts(config)

    def forward(self, hidden_BTD: Tensor) -> tuple[Tensor, Tensor]:
        hidden_ND = hidden_BTD.flatten(0, 1)
        logits_NE = self.gate(hidden_ND)
        share_NC, chosen_NC = torch.softmax(logits_NE, dim=-1, dtype=torch.float32).topk(self._chosen, dim=-1)
        if self._norms:
            share_NC = share_NC / share_NC.sum(dim=-1, keepdim=True)
        out_ND = self.experts(hidden_ND, chosen_NC, share_NC.to(logits_NE.dtype))
        return out_ND.view_as(hidden_BTD), logits_NE


class _Experts(nn.Module):
    """Gated MLPs, one after the other.

    An inner step of 690,528 parameters, one core: this loop 82 ms, grouped_mm 145, batched_mm 1880.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        count, outer, inner = config.num_experts, config.hidden_size, config.intermediate_size
        self.gate_up_proj = nn.Parameter(_room(count, 2 * inner, outer))
        self.down_proj = nn.Parameter(_room(count, outer, inner))

    def forward(self, hidden_ND: Tensor, chosen_NC: Tensor, share_NC: Tensor) -> Tensor:
        out_ND = torch.zeros_like(hidden_ND)
        for expert in torch.unique(chosen_NC).tolist():
            place_M, token_M = torch.where(chosen_NC.T.eq(expert))
            gate, up = linear(hidden_ND[token_M], self.gate_up_proj[expert]).chunk(2, dim=-1)
            each_MD = linear(silu(gate) * up, self.down_proj[expert]) * share_NC[token_M, place_M, None]
            out_ND.index_add_(0, token_M, each_MD.to(out_ND.dtype))
        return out_ND


def _room(*shape: int) -> Tensor:
    """Return a tensor that is not filled yet, where modules are made now."""
    return torch.empty(shape, dtype=torch.float32, device=torch.get_default_device())


def balance(routed: Sequence[Tensor], num_chosen: int) -> Tensor:
    """Return E * sum of f_e * P_e, by the routers' logits (N, E) of all blocks."""
    count_E = likely_E = torch.zeros(routed[0].shape[1], dtype=torch.float32, device=routed[0].device)
    for logits_NE in routed:
        likely_NE = torch.softmax(logits_NE, dim=-1)
        count_E = count_E + one_hot(likely_NE.topk(num_chosen).indices, len(count_E)).sum((0, 1))
        likely_E = likely_E + likely_NE.float().sum(0)
    rows = sum(len(logits_NE) for logits_NE in routed)
    return (count_E / rows * (likely_E / rows)).sum() * len(count_E)


# ---- weights put into a model ----
#
# Tensors by their names, and those of a model folder to begin a run from.


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


Read = Callable[[Path], Mapping[str, Tensor]]


def begin_from(folder: Path, module: nn.Module, read: Read = load_file) -> None:
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
        tensors = read(folder / MODEL)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UsageError(f"--from {folder}: {MODEL} cannot be read ({error})") from error
    try:
        put_in(module, tensors)
    except ConfigError as error:
        raise ConfigError(f"--from {folder} is another model than the run's: {error}{_terms_of(folder)}") from error


def check_begins(folder: Path, config: LanguageModelConfig) -> None:
    """Raise what ``begin_from`` would, by names and shapes: no weight is read, and no model takes memory."""
    with torch.device("meta"):
        begin_from(folder, LanguageModel(config), _outlines)


def _outlines(path: Path) -> dict[str, Tensor]:
    with safe_open(path, "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118  no mapping
    return {name: torch.empty(shape, dtype=torch.float32, device="meta") for name, shape in shapes.items()}


def _terms_of(folder: Path) -> str:
    """Return the end of the message: what [model] would have to say."""
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    sizes = ", ".join(f"{ours} = {config[theirs]}" for ours, theirs in SIZES.items() if theirs in config)
    return f"; its folder says [model] {sizes}" if sizes else ""
