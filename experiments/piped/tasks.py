"""Replicas that are whole beside replicas of four stages, whose boundaries are compressed, as tasks of the laboratory.

Ranks below ``whole`` train the language model as ever. The others train it as four machines would that hold two blocks
each: what crosses between these is rounded and narrowed by `decentral.pipeline.boundary`, there and back. All are
replicas of one swarm, and none of them knows of the others' kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from decentral.lab.work import Language, corpus_of
from decentral.manifest import Manifest
from decentral.pipeline.boundary import (
    BFloat16,
    Exact,
    Int8,
    Mapl,
    Rounding,
    StiefelMomentum,
    Subspace,
    crossing,
    draw_basis,
    onto,
)
from decentral.tasks.language_model import LanguageModel, build_language_model
from decentral.tasks.sizing import LanguageModelConfig

STAGES = 4
META_STEPS = 300  # of the small model that stands in for other stages

M = TypeVar("M", bound=nn.Module)
Boundary = Callable[[int, Tensor], Tensor]  # its number from 1 on and what the stage before it made: what the next gets


class Whole:
    """Text, and replicas without a boundary."""

    unit = "bits per byte"

    def __init__(self, manifest: Manifest, peers: int) -> None:
        self._terms = manifest
        self._text = Language(manifest, corpus_of(None, manifest.data.held_out), peers, uneven=False)
        self.tokens_of_step = self._text.tokens_of_step

    def model(self) -> nn.Module:
        """Build the language model; embedding and head are two matrices, as the first and the last stage have them."""
        return self._model(self._terms.model.layers)

    def _model(self, layers: int) -> LanguageModel:
        terms = self._terms.model
        config = LanguageModelConfig(
            hidden=terms.hidden, layers=layers, heads=terms.heads, context=terms.context, tie_embeddings=False
        )
        return build_language_model(config, seed=int(torch.randint(1 << 31, ())))

    def loss(self, model: LanguageModel, rank: int, step: int) -> Tensor:
        """Return the loss of a batch."""
        return _loss(model, self._text.tokens(rank, step))

    def held_out(self, model: nn.Module) -> float:
        """Return the loss of the model as whoever downloads it has it: whole."""
        return self._text.held_out(model)


def _loss(model: LanguageModel, tokens_BT: Tensor, weights: Mapping[str, Tensor] | None = None) -> Tensor:
    loss: Tensor = functional_call(
        model, dict(weights or {}), kwargs={"input_ids": tokens_BT, "labels": tokens_BT}
    ).loss
    return loss


@contextmanager
def _boundaries(model: LanguageModel, cross: Boundary) -> Iterator[None]:
    """Have hidden states go through ``cross`` before the first block of every stage but the first."""
    each = len(model.model.layers) // STAGES

    def enter(number: int) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
        return lambda _, given: (cross(number, given[0]), *given[1:])

    with ExitStack() as stack:
        for number in range(1, STAGES):
            hook = model.model.layers[number * each].register_forward_pre_hook(enter(number))
            stack.callback(hook.remove)
        yield


class Piped(Whole, ABC):
    """Two whole, and two of stages."""

    whole: ClassVar[int] = 2  # ranks below it are

    def loss(self, model: LanguageModel, rank: int, step: int) -> Tensor:
        """Return the loss of a batch."""
        if rank < self.whole:
            return super().loss(model, rank, step)
        return self.piped_loss(model, self._text.tokens(rank, step), rank, step)

    @abstractmethod
    def piped_loss(self, model: LanguageModel, tokens_BT: Tensor, rank: int, step: int) -> Tensor:
        """Return the loss of a batch of a replica of stages."""


# ---- all values, rounded ----


class Unrounded(Piped):
    """Float32 crosses."""

    rounding: ClassVar[Rounding] = Exact()

    def piped_loss(self, model: LanguageModel, tokens_BT: Tensor, rank: int, step: int) -> Tensor:
        """Round what crosses."""
        with _boundaries(model, lambda _, states: crossing(states, self.rounding)):
            return _loss(model, tokens_BT)


class Bf16(Unrounded):
    """bfloat16 crosses."""

    rounding = BFloat16()


class Int8Blocks(Unrounded):
    """Bytes cross, and a scale for every 64."""

    rounding = Int8()


# ---- a fixed subspace ----


class Subspace4(Piped):
    """A quarter of the values crosses, by a basis that the run's seed draws."""

    share: ClassVar[int] = 4

    def __init__(self, manifest: Manifest, peers: int) -> None:
        super().__init__(manifest, peers)
        self._width = manifest.model.hidden
        self._seen: dict[int, dict[str, Tensor]] = {}  # of each rank what its last step began with

    def piped_loss(self, model: LanguageModel, tokens_BT: Tensor, rank: int, step: int) -> Tensor:
        """Have what stages add lie in the span."""
        basis_DK = self.basis(step)
        self._keep_steps_in(basis_DK, model, rank, step)
        inside = {name: onto(basis_DK, one.T).T for name, one in _writers(model).items()}
        subspace = Subspace(basis_DK)
        outside_BTD = subspace.outside(model.model.embed_tokens.weight)[tokens_BT]

        def cross(_: int, states: Tensor) -> Tensor:
            return subspace.widen(crossing(subspace.narrow(states, outside_BTD), BFloat16()), outside_BTD)

        with _boundaries(model, cross):
            return _loss(model, tokens_BT, inside)

    def basis(self, step: int) -> Tensor:
        """Return the basis of an inner step."""
        return self._drawn(0)

    def _drawn(self, number: int) -> Tensor:
        seed = self._terms.run.seed * 1_000_003 + number
        return draw_basis(self._width, self._width // self.share, torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def _keep_steps_in(self, basis_DK: Tensor, model: LanguageModel, rank: int, step: int) -> None:
        """Take from the last inner step what left the span: an optimizer that goes by single values does not stay.

        Not across an outer step, which brings what whole replicas did, and for which the inner step before it is over.
        """
        rows = {name: one.T for name, one in _writers(model).items()} | {"embedding": model.model.embed_tokens.weight}
        if step % self._terms.inner.steps:
            for name, before in self._seen[rank].items():
                rows[name].copy_(before + onto(basis_DK, rows[name] - before))
        self._seen[rank] = {name: one.clone() for name, one in rows.items()}


def _writers(model: LanguageModel) -> dict[str, Tensor]:
    """Return the matrices (D, inputs) whose outputs are added to hidden states."""
    return {name: one for name, one in model.named_parameters() if name.endswith(("o_proj.weight", "down_proj.weight"))}


class Subspace8(Subspace4):
    """An eighth of the values crosses."""

    share = 8


class Redrawn4(Subspace4):
    """A control: the basis is another one at every step."""

    def basis(self, step: int) -> Tensor:
        """Return a basis that no step had before."""
        return self._drawn(1 + step)


class AllSubspace8(Subspace8):
    """All four replicas are piped."""

    whole = 0


# ---- a subspace that is learnt ----


class Mapl4(Piped):
    """A quarter of the values crosses, by a basis and tables that each piped replica learns for itself."""

    share: ClassVar[int] = 4

    def __init__(self, manifest: Manifest, peers: int) -> None:
        super().__init__(manifest, peers)
        self._learnt: dict[int, _Learnt] = {}

    def piped_loss(self, model: LanguageModel, tokens_BT: Tensor, rank: int, step: int) -> Tensor:
        """Learn at the boundaries, too: they make the step for which the last batch left gradients."""
        if rank not in self._learnt:
            self._learnt[rank] = _Learnt(model, self._terms, self.share, rank)
        learnt = self._learnt[rank]
        learnt.step()

        def cross(number: int, states: Tensor) -> Tensor:
            at = learnt.boundaries[number - 1]
            return at.widen(crossing(at.narrow(states, tokens_BT), BFloat16()), tokens_BT)

        with _boundaries(model, cross):
            return _loss(model, tokens_BT)


class _Learnt:
    """The boundaries of a piped replica."""

    def __init__(self, model: LanguageModel, terms: Manifest, share: int, rank: int) -> None:
        width, random = terms.model.hidden, torch.Generator().manual_seed(terms.run.seed * 1_000_003 + rank)
        kept, embedding_VD = width // share, model.model.embed_tokens.weight
        self.boundaries = [
            Mapl(draw_basis(width, kept, random), draw_basis(width, kept, random).T, embedding_VD)
            for _ in range(STAGES - 1)
        ]
        rate = terms.inner.learning_rate
        assert rate is not None, "a study's cells have one"
        self._bases = [StiefelMomentum(one.basis_DK, rate / 10) for one in self.boundaries]
        tables = [table for one in self.boundaries for table in (one.before_VK, one.after_VK)]
        self._tables = torch.optim.AdamW(tables, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self) -> None:
        for basis in self._bases:
            basis.step()
        self._tables.step()
        self._tables.zero_grad()


class Mapl8(Mapl4):
    """An eighth of the values crosses."""

    share = 8


class AllMapl8(Mapl8):
    """All four replicas are piped."""

    whole = 0


# ---- nothing crosses ----


class Assembled(Piped):
    """Each stage is trained alone, with a block of a small trained model in place of each other stage.

    The small model, of a block for each stage and its own embedding and head, is trained before on the same text, and
    stays as it is. Source: Ni et al., "Deep Model Assembling", 2022, arXiv:2212.04129.
    """

    def __init__(self, manifest: Manifest, peers: int) -> None:
        super().__init__(manifest, peers)
        self._meta: LanguageModel | None = None

    def piped_loss(self, model: LanguageModel, tokens_BT: Tensor, rank: int, step: int) -> Tensor:
        """Add up the losses of the machines, each of which has a batch to itself."""
        self._meta = self._meta or self._trained_meta(rank)
        return torch.stack([_loss(_linked(model, self._meta, stage), tokens_BT) for stage in range(STAGES)]).sum()

    def _trained_meta(self, rank: int) -> LanguageModel:
        meta = self._model(STAGES)
        rate = self._terms.inner.learning_rate
        assert rate is not None, "a study's cells have one"
        optimizer = torch.optim.AdamW(meta.parameters(), lr=rate, betas=(0.9, 0.95))
        with torch.enable_grad():
            for step in range(META_STEPS):
                optimizer.zero_grad()
                _loss(meta, self._text.tokens(rank, step)).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        return meta.requires_grad_(False)


def _linked(model: LanguageModel, meta: LanguageModel, stage: int) -> LanguageModel:
    """Return a model with one stage of ``model``, and of ``meta`` the rest."""
    each, first, last = len(model.model.layers) // STAGES, stage == 0, stage == STAGES - 1
    blocks: list[nn.Module] = list(meta.model.layers)
    blocks[stage : stage + 1] = model.model.layers[stage * each : (stage + 1) * each]
    start, end = model if first else meta, model if last else meta
    decoder = _with(
        model.model, embed_tokens=start.model.embed_tokens, layers=nn.ModuleList(blocks), norm=end.model.norm
    )
    return _with(model, model=decoder, lm_head=end.lm_head)


def _with(module: M, **parts: nn.Module) -> M:
    """Return the module with other parts, which it shares with whoever has them."""
    made = copy(module)
    made._modules = {**module._modules, **parts}
    return made
