"""Tasks that the replicas of a laboratory learn, and how their gradients are made.

The batch of an inner step is a function of (seed, rank, step) and of nothing else, so that every method of a study sees
the same data in the same order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy, embedding, scaled_dot_product_attention, silu

from decentral.errors import ConfigError
from decentral.manifest import Manifest
from decentral.tasks.batches import window_start
from decentral.tasks.corpus import Corpus, load_corpus
from decentral.tasks.evaluate import bits_per_byte
from decentral.tasks.language_model import build_language_model
from decentral.tasks.sizing import LanguageModelConfig
from decentral.training.inner import build_inner, inner_step, warm_up

__all__ = [
    "Digits",
    "Language",
    "LanguagePeer",
    "OneByOne",
    "StackedLlama",
    "Trained",
    "Work",
    "corpus_of",
    "stacked_losses",
]

# ---- many Llamas of one size at once ----
#
# Each weight of all replicas is one tensor, and each layer one batched product.
#
# A step of a model of 0.1 M parameters is mostly Python when replicas take turns. Here 64 of them share one graph:
# their weights are views of stacked tensors, so their optimizers are as ever, and the gradient of the sum of their
# losses is each one's own. What is computed is what the built-in Llama computes, to float32 rounding; a test compares
# them.

# Shape suffixes: R = replicas, B = windows of a batch, T = tokens of one, D = width, H = heads, K = width of a head.

Tokens = Callable[[int, int], Tensor]  # rank, step -> int64 (B, T)


class StackedLlama:
    """Gradients of all ``modules`` in one pass. Their parameters share storage from now on."""

    def __init__(self, modules: Sequence[nn.Module], tokens: Tokens) -> None:
        self._config: Any = modules[0].config  # Any: its attributes have no types
        self._tokens = tokens
        self._named = [dict(module.named_parameters()) for module in modules]
        self.stacked = {name: _share([named[name] for named in self._named]) for name in self._named[0]}

    def backward(self, steps: Mapping[int, int]) -> dict[int, Tensor]:
        """Do what ``Trained.backward`` says."""
        losses = self.gradients(steps)
        self.hand_out(list(losses))
        for stacked in self.stacked.values():
            stacked.grad = None
        return losses

    def gradients(self, steps: Mapping[int, int]) -> dict[int, Tensor]:
        """Do what ``Trained.gradients`` says."""
        ranks = sorted(steps)
        tokens_RBT = torch.stack([self._tokens(rank, steps[rank]) for rank in ranks])
        chosen = None if len(ranks) == len(self._named) else torch.tensor(ranks)
        weights = {name: one if chosen is None else one[chosen] for name, one in self.stacked.items()}
        losses_R = stacked_losses(weights, tokens_RBT.to(weights["model.norm.weight"].device), self._config)
        losses_R.sum().backward()  # type: ignore[no-untyped-call]
        return dict(zip(ranks, losses_R.detach(), strict=True))

    def hand_out(self, ranks: Sequence[int]) -> None:
        """Do what ``Trained.hand_out`` says."""
        for name, stacked in self.stacked.items():
            assert stacked.grad is not None, "every weight of a Llama has a part in the loss"
            rows = stacked.grad.unbind(0)
            for rank in ranks:
                self._named[rank][name].grad = rows[rank]


def _share(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Make one leaf (R, ...), of which each of ``parameters`` is a view from now on."""
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
    hidden_RND = _normalize(hidden_RND, weights["model.norm.weight"], config)
    logits = _times(hidden_RND, weights.get("lm_head.weight", table)).view(replicas, batch, length, -1)[:, :, :-1]
    each = cross_entropy(logits.flatten(0, 2), tokens_RBT[:, :, 1:].flatten(), reduction="none")
    return each.view(replicas, -1).mean(dim=1)


class _Layer:
    """A transformer block of all replicas."""

    def __init__(self, weights: Mapping[str, Tensor], prefix: str, config: Any) -> None:
        self._weights, self._prefix, self._config = weights, prefix, config

    def _of(self, name: str) -> Tensor:
        return self._weights[f"{self._prefix}{name}.weight"]

    def attention(self, hidden_RND: Tensor, shape: tuple[int, int, int], turn: tuple[Tensor, Tensor]) -> Tensor:
        normed_RND = _normalize(hidden_RND, self._of("input_layernorm"), self._config)
        replicas, batch, length = shape

        def heads(name: str) -> Tensor:
            made = _times(normed_RND, self._of(f"self_attn.{name}_proj"))
            return made.view(replicas * batch, length, self._config.num_attention_heads, -1).transpose(1, 2)

        query, key = _turn(heads("q"), turn), _turn(heads("k"), turn)
        mixed = scaled_dot_product_attention(query, key, heads("v"), is_causal=True)
        return _times(mixed.transpose(1, 2).reshape(hidden_RND.shape), self._of("self_attn.o_proj"))

    def mlp(self, hidden_RND: Tensor) -> Tensor:
        normed_RND = _normalize(hidden_RND, self._of("post_attention_layernorm"), self._config)
        gate = silu(_times(normed_RND, self._of("mlp.gate_proj")))
        return _times(gate * _times(normed_RND, self._of("mlp.up_proj")), self._of("mlp.down_proj"))


def _times(hidden_RND: Tensor, weight_ROD: Tensor) -> Tensor:
    return torch.bmm(hidden_RND, weight_ROD.transpose(1, 2))


def _normalize(hidden_RND: Tensor, scale_RD: Tensor, config: Any) -> Tensor:
    """RMSNorm."""
    size = hidden_RND.square().mean(-1, keepdim=True)
    return hidden_RND * torch.rsqrt(size + config.rms_norm_eps) * scale_RD.unsqueeze(1)


def _rotary(length: int, config: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines (T, K) of the positions."""
    width, theta = config.hidden_size // config.num_attention_heads, config.rope_parameters["rope_theta"]
    inverse = theta ** (-torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
    angle = torch.outer(torch.arange(length, device=device, dtype=torch.float32), inverse).repeat(1, 2)
    return angle.cos(), angle.sin()


def _turn(heads_HTK: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    first, second = heads_HTK.chunk(2, dim=-1)
    return heads_HTK * turn[0] + torch.cat([-second, first], dim=-1) * turn[1]


# ---- a task ----


class Trained(Protocol):
    """Makes gradients for several replicas; ``modules`` are the ones it was built for."""

    @property
    def stacked(self) -> Mapping[str, Tensor]:
        """The weights of all replicas by name, (replicas, ...), of which theirs are views; empty: there are none."""
        ...

    def gradients(self, steps: Mapping[int, int]) -> dict[int, Tensor]:
        """As ``backward``, but that gradients are left in ``stacked`` alone."""
        ...

    def hand_out(self, ranks: Sequence[int]) -> None:
        """The gradients in ``stacked``, as views, to the parameters of these modules."""
        ...

    def backward(self, steps: Mapping[int, int]) -> dict[int, Tensor]:
        """Gradients in the parameters of each module of ``steps``, by rank its inner step; the losses, by rank."""
        ...


class Work(Protocol):
    """A task with its data."""

    def model(self, number: int = 0) -> nn.Module:
        """A freshly initialised model of the run's seed, or of one of its own; the same bits at every call."""
        ...

    @property
    def tokens_of_step(self) -> int:
        """Return how much one replica sees in an inner step: bytes of text, or examples."""
        ...

    def loss(self, module: nn.Module, rank: int, step: int) -> Tensor:
        """Mean loss of the batch of inner step ``step``, counted from 0, of the replica of this rank."""
        ...

    def held_out(self, module: nn.Module) -> float:
        """The loss on data that nobody trains on, in the task's own unit."""
        ...

    def trained(self, modules: Sequence[nn.Module]) -> Trained:
        """How gradients of these are made; they may share storage from then on."""
        ...


class OneByOne:
    """Gradients of one module after the other: of any model."""

    def __init__(self, work: Work, modules: Sequence[nn.Module]) -> None:
        self._work, self._modules = work, modules
        self.stacked: Mapping[str, Tensor] = {}

    def gradients(self, steps: Mapping[int, int]) -> dict[int, Tensor]:
        """Do what ``Trained.gradients`` says."""
        return self.backward(steps)

    def hand_out(self, ranks: Sequence[int]) -> None:
        """They are there."""

    def backward(self, steps: Mapping[int, int]) -> dict[int, Tensor]:
        """Do what ``Trained.backward`` says."""
        losses = {}
        for rank, step in steps.items():
            loss = self._work.loss(self._modules[rank], rank, step)
            loss.backward()  # type: ignore[no-untyped-call]
            losses[rank] = loss.detach()
        return losses


# ---- scikit-learn's digits ----
#
# 1,797 images of 8 x 8, on uneven shards: the smallest task on which peers can disagree.
#
# The model has one hidden layer of relu. Of each digit every peer has a share drawn from Dirichlet(alpha), as in the
# attacks' experiments: at 0.1 most peers miss some digits, at 100 all have about the same.

# Shape suffixes: D = digits of a set, X = pixels.

_PIXELS, _LABELS, _HELD_OUT = 64, 10, 360
_FEWEST: Final = 8  # digits of a peer; shards are drawn again until all have as many


@dataclass(frozen=True, slots=True)
class _Split:
    image_DX: Tensor
    label_D: Tensor
    held_image_DX: Tensor
    held_label_D: Tensor
    shards: tuple[Tensor, ...]  # places in the training set, of each rank


class Digits:
    """The digits, as Work. The split, the shards and the batches follow from the run's seed."""

    def __init__(self, manifest: Manifest, peers: int, alpha: float) -> None:
        self._manifest = manifest
        self._split = _split(peers, alpha, manifest.run.seed)

    def model(self, number: int = 0) -> nn.Module:
        """Do what ``Work.model`` says: weights uniform within 1 / sqrt(inputs), biases zero."""
        hidden, generator = self._manifest.model.hidden, torch.Generator().manual_seed(self._manifest.run.seed + number)
        made = nn.Sequential(nn.Linear(_PIXELS, hidden), nn.ReLU(), nn.Linear(hidden, _LABELS))
        with torch.no_grad():
            for parameter in made.parameters():
                bound = parameter.shape[1] ** -0.5 if parameter.ndim == 2 else 0.0
                parameter.uniform_(-bound, bound, generator=generator)
        return made

    @property
    def tokens_of_step(self) -> int:
        """Return ``Work.tokens_of_step``: examples."""
        return self._manifest.data.batch_size

    def loss(self, module: nn.Module, rank: int, step: int) -> Tensor:
        """Do what ``Work.loss`` says."""
        shard = self._split.shards[rank]
        random = np.random.default_rng((self._manifest.run.seed, rank, step))
        place = shard[torch.from_numpy(random.integers(len(shard), size=self._manifest.data.batch_size))]
        return functional.cross_entropy(module(self._split.image_DX[place]), self._split.label_D[place])

    @torch.no_grad()
    def held_out(self, module: nn.Module) -> float:
        """Do what ``Work.held_out`` says; in nats per digit."""
        logits = module(self._split.held_image_DX)
        return float(functional.cross_entropy(logits.double(), self._split.held_label_D))

    def trained(self, modules: Sequence[nn.Module]) -> Trained:
        """Do what ``Work.trained`` says."""
        return OneByOne(self, modules)


def _split(peers: int, alpha: float, seed: int) -> _Split:
    image_DX, label_D = _load_digits()
    random = np.random.default_rng(seed)
    order = random.permutation(len(label_D))
    held, train = order[:_HELD_OUT], order[_HELD_OUT:]
    shards = _shards(label_D[train], peers, alpha, random)
    images, labels = torch.from_numpy(image_DX).float() / 16, torch.from_numpy(label_D).long()
    return _Split(images[train], labels[train], images[held], labels[held], shards)


def _load_digits() -> tuple[np.ndarray, np.ndarray]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigError(
            "task digits needs scikit-learn, which has them; pip install 'decentral[lab]', or take another task"
        ) from error
    images, labels = load_digits(return_X_y=True)
    return images, labels


def _shards(label_D: np.ndarray, peers: int, alpha: float, random: np.random.Generator) -> tuple[Tensor, ...]:
    """Places of each rank, at least a few: drawn again until all have them."""
    if peers * _FEWEST > len(label_D):
        raise ConfigError(f"{peers} peers share {len(label_D)} digits; use {len(label_D) // _FEWEST} peers or fewer")
    for _ in range(1000):
        drawn = _drawn_shards(label_D, peers, alpha, random)
        if min(map(len, drawn)) >= _FEWEST:
            return tuple(torch.from_numpy(one) for one in drawn)
    raise ConfigError(f"alpha = {alpha:g} leaves some of {peers} peers without digits; raise it, or have fewer peers")


def _drawn_shards(label_D: np.ndarray, peers: int, alpha: float, random: np.random.Generator) -> list[np.ndarray]:
    found: list[list[np.ndarray]] = [[] for _ in range(peers)]
    for label in range(_LABELS):
        places = random.permutation(np.flatnonzero(label_D == label))
        cuts = (np.cumsum(random.dirichlet([alpha] * peers))[:-1] * len(places)).astype(int)
        for mine, part in zip(found, np.split(places, cuts), strict=True):
            mine.append(part)
    return [np.concatenate(parts) for parts in found]


# ---- text, byte by byte ----
#
# The language model of the shipped task, on evenly or unevenly shared text.
#
# With even shares every peer draws windows from all of the text. With uneven ones each has a part of its own, one after
# the other: the standard library is read in the order of its folders, so a peer has some folders and not the others'.


class Language:
    """Text, as Work. Which bytes a step sees follows from the run's seed, the rank and the step."""

    def __init__(
        self, manifest: Manifest, corpus: Corpus, peers: int, *, uneven: bool, windows: int = 128, device: str = "cpu"
    ) -> None:
        self._manifest, self._corpus, self._windows = manifest, corpus, windows
        self._peers, self._uneven, self._device = peers, uneven, device
        self._config = LanguageModelConfig.of(manifest.model)

    def model(self, number: int = 0) -> nn.Module:
        """Do what ``Work.model`` says."""
        built: nn.Module = build_language_model(self._config, seed=self._manifest.run.seed + number)
        return built.to(self._device)

    @property
    def tokens_of_step(self) -> int:
        """Return ``Work.tokens_of_step``."""
        return self._manifest.data.batch_size * self._config.context

    def tokens(self, rank: int, step: int) -> Tensor:
        """The windows of a step, int64 (batch, context)."""
        begin, stop = self._part(rank)
        batch, context = self._manifest.data.batch_size, self._config.context
        seed, peer = self._manifest.run.seed, rank.to_bytes(4, "little")
        rows = range(step * batch, (step + 1) * batch)
        starts = torch.tensor([begin + window_start(seed, peer, row, stop - begin - context) for row in rows])
        return self._corpus.train[starts[:, None] + torch.arange(context)].long()

    def _part(self, rank: int) -> tuple[int, int]:
        """Where this rank's text begins and ends."""
        length = self._corpus.train.numel()
        if not self._uneven:
            return 0, length
        return length * rank // self._peers, length * (rank + 1) // self._peers

    def loss(self, module: nn.Module, rank: int, step: int) -> Tensor:
        """Do what ``Work.loss`` says."""
        tokens = self.tokens(rank, step).to(self._device)
        loss: Tensor = module(input_ids=tokens, labels=tokens).loss
        return loss

    def held_out(self, module: nn.Module) -> float:
        """Do what ``Work.held_out`` says; in bits per byte."""
        held: Any = module
        return bits_per_byte(
            held, self._corpus.held_out, context=self._config.context, num_windows=self._windows, batch_size=64
        )

    def trained(self, modules: Sequence[nn.Module]) -> Trained:
        """Do what ``Work.trained`` says: all at once, but for mixtures, whose tokens go different ways."""
        if self._config.experts is not None or len(modules) == 1:
            return OneByOne(self, modules)
        return StackedLlama(modules, self.tokens)


# ---- one peer's training on text ----


@dataclass(frozen=True, slots=True)
class LanguagePeer:
    """Builds the training of the peer of a number, as somebody's own function does: see decentral.trial.own_model.

    ``terms`` have the model and the inner optimizer; ``data`` is as --data names it, None the standard library.
    """

    terms: Manifest
    data: Path | str | None = None

    def __call__(self, number: int) -> tuple[nn.Module, Any, Any, Any]:
        """The model, its optimizers, one inner step, and the held-out loss in nats per byte."""
        inner = self.terms.inner
        work = Language(self.terms, corpus_of(self.data, self.terms.data.held_out), 1, uneven=False)
        model = work.model()
        optimizers = build_inner(inner, model)
        schedulers = [warm_up(optimizer, inner.warmup) for optimizer in optimizers]
        numbers = itertools.count()

        def backward(loss: Tensor) -> None:
            loss.backward()  # type: ignore[no-untyped-call]
            if inner.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), inner.clip)

        def step() -> None:
            at = next(numbers)
            inner_step(inner, optimizers, lambda: work.loss(model, number, at), backward=backward)
            for scheduler in schedulers:
                scheduler.step()
            model.zero_grad()

        return model, optimizers, step, lambda: work.held_out(model) * math.log(2)


@cache
def corpus_of(data: Path | str | None, held_out: float) -> Corpus:
    """Read once in a process."""
    return load_corpus(data, held_out=held_out)
