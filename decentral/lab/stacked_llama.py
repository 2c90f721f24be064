"""Many Llamas of one size at once: each weight of all replicas is one tensor, and each layer one batched product.

A step of a model of 0.1 M parameters is mostly Python when replicas take turns. Here 64 of them share one graph: their
weights are views of stacked tensors, so their optimizers are as ever, and the gradient of the sum of their losses is
each one's own. What is computed is what ``transformers``' Llama computes, to float32 rounding; a test compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding, scaled_dot_product_attention, silu

__all__ = ["StackedLlama", "stacked_losses"]

# Shape suffixes: R = replicas, B = windows of a batch, T = tokens of one, D = width, H = heads, K = width of a head.

Tokens = Callable[[int, int], Tensor]  # rank, step -> int64 (B, T)


class StackedLlama:
    """Gradients of all ``modules`` in one pass. Their parameters share storage from now on."""

    def __init__(self, modules: Sequence[nn.Module], tokens: Tokens) -> None:
        self._config: Any = modules[0].config  # Any: transformers ships no types
        self._tokens = tokens
        self._named = [dict(module.named_parameters()) for module in modules]
        self.stacked = {name: _shared([named[name] for named in self._named]) for name in self._named[0]}

    def backward(self, steps: Mapping[int, int]) -> dict[int, Tensor]:
        """See Trained."""
        losses = self.gradients(steps)
        self.hand_out(list(losses))
        for stacked in self.stacked.values():
            stacked.grad = None
        return losses

    def gradients(self, steps: Mapping[int, int]) -> dict[int, Tensor]:
        """See Trained."""
        ranks = sorted(steps)
        tokens_RBT = torch.stack([self._tokens(rank, steps[rank]) for rank in ranks])
        chosen = None if len(ranks) == len(self._named) else torch.tensor(ranks)
        weights = {name: one if chosen is None else one[chosen] for name, one in self.stacked.items()}
        losses_R = stacked_losses(weights, tokens_RBT.to(weights["model.norm.weight"].device), self._config)
        losses_R.sum().backward()  # type: ignore[no-untyped-call]
        return dict(zip(ranks, losses_R.detach(), strict=True))

    def hand_out(self, ranks: Sequence[int]) -> None:
        """See Trained."""
        for name, stacked in self.stacked.items():
            assert stacked.grad is not None, "every weight of a Llama has a part in the loss"
            rows = stacked.grad.unbind(0)
            for rank in ranks:
                self._named[rank][name].grad = rows[rank]


def _shared(parameters: Sequence[nn.Parameter]) -> Tensor:
    """One leaf (R, ...), of which each of ``parameters`` is a view from now on."""
    stacked = torch.stack([parameter.detach() for parameter in parameters])
    for row, parameter in zip(stacked, parameters, strict=True):
        parameter.data = row
    return stacked.requires_grad_()


def stacked_losses(weights: Mapping[str, Tensor], tokens_RBT: Tensor, config: Any) -> Tensor:
    """Mean cross-entropy in nats (R,) of the next token, by the weights (R, ...) of a Llama of ``config``."""
    replicas, batch, length = tokens_RBT.shape
    table = weights["model.embed_tokens.weight"]
    offset_R = torch.arange(replicas, device=table.device).view(-1, 1, 1) * table.shape[1]
    hidden_RND = embedding(tokens_RBT + offset_R, table.flatten(0, 1)).view(replicas, batch * length, -1)
    turn = _rotary(length, config, table.device)
    for layer in range(config.num_hidden_layers):
        own = _Layer(weights, f"model.layers.{layer}.", config)
        hidden_RND = hidden_RND + own.attention(hidden_RND, (replicas, batch, length), turn)
        hidden_RND = hidden_RND + own.mlp(hidden_RND)
    hidden_RND = _normed(hidden_RND, weights["model.norm.weight"], config)
    logits = _times(hidden_RND, weights.get("lm_head.weight", table)).view(replicas, batch, length, -1)[:, :, :-1]
    each = cross_entropy(logits.flatten(0, 2), tokens_RBT[:, :, 1:].flatten(), reduction="none")
    return each.view(replicas, -1).mean(dim=1)


class _Layer:
    """One transformer block of all replicas."""

    def __init__(self, weights: Mapping[str, Tensor], prefix: str, config: Any) -> None:
        self._weights, self._prefix, self._config = weights, prefix, config

    def _of(self, name: str) -> Tensor:
        return self._weights[f"{self._prefix}{name}.weight"]

    def attention(self, hidden_RND: Tensor, shape: tuple[int, int, int], turn: tuple[Tensor, Tensor]) -> Tensor:
        normed_RND = _normed(hidden_RND, self._of("input_layernorm"), self._config)
        replicas, batch, length = shape

        def heads(name: str) -> Tensor:
            made = _times(normed_RND, self._of(f"self_attn.{name}_proj"))
            return made.view(replicas * batch, length, self._config.num_attention_heads, -1).transpose(1, 2)

        query, key = _turned(heads("q"), turn), _turned(heads("k"), turn)
        mixed = scaled_dot_product_attention(query, key, heads("v"), is_causal=True)
        return _times(mixed.transpose(1, 2).reshape(hidden_RND.shape), self._of("self_attn.o_proj"))

    def mlp(self, hidden_RND: Tensor) -> Tensor:
        normed_RND = _normed(hidden_RND, self._of("post_attention_layernorm"), self._config)
        gate = silu(_times(normed_RND, self._of("mlp.gate_proj")))
        return _times(gate * _times(normed_RND, self._of("mlp.up_proj")), self._of("mlp.down_proj"))


def _times(hidden_RND: Tensor, weight_ROD: Tensor) -> Tensor:
    return torch.bmm(hidden_RND, weight_ROD.transpose(1, 2))


def _normed(hidden_RND: Tensor, scale_RD: Tensor, config: Any) -> Tensor:
    """RMSNorm."""
    size = hidden_RND.square().mean(-1, keepdim=True)
    return hidden_RND * torch.rsqrt(size + config.rms_norm_eps) * scale_RD.unsqueeze(1)


def _rotary(length: int, config: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines (T, K) of the positions."""
    width, theta = config.hidden_size // config.num_attention_heads, config.rope_parameters["rope_theta"]
    inverse = theta ** (-torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
    angle = torch.outer(torch.arange(length, device=device, dtype=torch.float32), inverse).repeat(1, 2)
    return angle.cos(), angle.sin()


def _turned(heads_HTK: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    first, second = heads_HTK.chunk(2, dim=-1)
    return heads_HTK * turn[0] + torch.cat([-second, first], dim=-1) * turn[1]
