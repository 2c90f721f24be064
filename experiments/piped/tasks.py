"""Replicas that are whole beside replicas of four stages, whose boundaries are compressed, as tasks of the laboratory.

Ranks below ``whole`` train the language model as ever. The others train it as four machines would that hold two blocks
each: what crosses between these is rounded and narrowed by `decentral.pipeline.boundary`, there and back. All are
replicas of one swarm, and none of them knows of the others' kind.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from decentral.lab.work import Language, corpus_of
from decentral.manifest import Manifest
from decentral.optimizers import Channel, Live, RoundInfo
from decentral.optimizers.base import CHANGE, Layout, Speaking, State
from decentral.optimizers.owners import is_still
from decentral.optimizers.sparseloco import SparseLoCo
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


# ---- no flush between steps ----


class NoFlushNear(Unrounded):
    """A stage steps once its micro-batches are back; those of the next step that are under way meet newer weights.

    A micro-batch is one sample. With L * (S - s - 1) of the next step in flight at stage s, as the order of turns has
    it when steps follow one another without a pause, so many went forward through the weights of a step before; all go
    back through the newer ones. No weights are kept, none foretold. Each round begins with a flush: its first step has
    nothing in flight. Samples of a stage and a step that saw the same weights go as one batch.

    Source: Elam et al., "Breaking the Bubble: Asynchronous Pipeline Parallel Training with Bounded Weight
    Inconsistency", 2026, arXiv:2606.07881.
    """

    lead: ClassVar[int] = 2
    behind: ClassVar[int] = 1  # steps between the weights that they go forward through and those that they go back

    def __init__(self, manifest: Manifest, peers: int) -> None:
        super().__init__(manifest, peers)
        self._in_flight: dict[tuple[int, int], list[_Passes]] = {}  # by rank and step, of each stage

    def piped_loss(self, model: LanguageModel, tokens_BT: Tensor, rank: int, step: int) -> Tensor:
        """Leave the gradients in the parameters; the loss that is returned has none left to give."""
        passes = self._in_flight.pop((rank, step), _nothing_yet())
        self._advance(model, passes, tokens_BT, [len(tokens_BT)] * STAGES)
        loss = model.loss(torch.cat([made for _, made in passes[-1]]), tokens_BT)
        _back(passes, loss)
        later, of_round = step + self.behind, self._terms.inner.steps
        if later // of_round == step // of_round:
            self._in_flight[rank, later] = self._ahead(model, self._text.tokens(rank, later))
        return loss.detach().requires_grad_()

    def _ahead(self, model: LanguageModel, tokens_BT: Tensor) -> list[_Passes]:
        """Run what is in flight of a later step, of which the backward pass is to find the weights as they are then."""
        passes, most = _nothing_yet(), len(tokens_BT) - 1
        with saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
            in_flight = [min(self.lead * (STAGES - stage - 1), most) for stage in range(STAGES)]
            self._advance(model, passes, tokens_BT, in_flight)
        return passes

    def _advance(self, model: LanguageModel, passes: list[_Passes], states: Tensor, upto: Sequence[int]) -> None:
        """Have each stage go forward with the rows below its own ``upto`` that it has not had."""
        for number, (run, had, end) in enumerate(zip(_stages(model), passes, upto, strict=True), 1):
            start = sum(len(given) for given, _ in had)
            if start < end:
                given = states[start:end].detach().requires_grad_(states.is_floating_point())
                made = run(given)
                had.append((given, made if number == STAGES else crossing(made, self.rounding)))
            if not had:
                return
            states = torch.cat([made for _, made in had]).detach()


_Passes = list[tuple[Tensor, Tensor]]  # what a stage was given and what it made, of rows one after the other


def _nothing_yet() -> list[_Passes]:
    return [[] for _ in range(STAGES)]


def _stages(model: LanguageModel) -> list[Callable[[Tensor], Tensor]]:
    """Return each stage as a function of what the one before it made."""
    first, *blocks, last = [run for run, _ in model.segments()]
    each = len(blocks) // STAGES
    cut = [blocks[at : at + each] for at in range(0, len(blocks), each)]
    return [_chain(part) for part in ([first, *cut[0]], *cut[1:-1], [*cut[-1], last])]


def _chain(parts: Sequence[Callable[[Tensor], Tensor]]) -> Callable[[Tensor], Tensor]:
    def run(states: Tensor) -> Tensor:
        for part in parts:
            states = part(states)
        return states

    return run


def _back(passes: Sequence[_Passes], loss: Tensor) -> None:
    """Go back stage by stage, each with the gradients of what the next one was given."""
    loss.backward()  # type: ignore[no-untyped-call]
    for after, before in zip(passes[:0:-1], passes[-2::-1], strict=True):
        gradient = torch.cat([given.grad for given, _ in after if given.grad is not None])
        made = [made for _, made in before]
        torch.autograd.backward(made, torch.split_with_sizes(gradient, [len(one) for one in made]))


class NoFlushFar(NoFlushNear):
    """As many in flight as a line over the internet wants."""

    lead = 4


class EightLate(NoFlushFar):
    """A control: forward through the weights of eight steps before."""

    behind = 8


# ---- a stage that is gone ----


@dataclass(frozen=True, slots=True)
class ByStages(Speaking, SparseLoCo):
    """SparseLoCo, the mean of each stage over those that trained it: a stage that stood still says so."""

    name: ClassVar[str] = "sparseloco_by_stages"

    def channels(self) -> tuple[Channel, ...]:
        """Return the change, of each contributor by itself."""
        return (replace(CHANGE, combine="each"),)

    def says(self, live: Live, fragment: int, sent: Sequence[Tensor]) -> bytes:
        """Return of each stage whether it moved."""
        return bytes(not is_still(sent[0], spans) for spans in _spans(live.layout(fragment)))

    def outer_step(
        self, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Subtract lr times the average of each stage; one that nobody trained stays."""
        after = anchor.clone()
        for stage, spans in enumerate(_spans(dict(zip(info.names, info.shapes, strict=True)))):
            rows = [n for n, one in enumerate(info.contributors) if one.summary[stage]]
            for start, stop in spans if rows else ():
                after[start:stop] -= self.lr * received["change"][rows, start:stop].mean(0)
        return after, {}


def _spans(layout: Layout) -> list[list[tuple[int, int]]]:
    """Return where each stage is in the flat vector."""
    blocks = 1 + max(int(name.split(".")[2]) for name in layout if ".layers." in name)
    spans: list[list[tuple[int, int]]] = [[] for _ in range(STAGES)]
    start = 0
    for name, shape in layout.items():
        stop = start + math.prod(shape)
        block = int(name.split(".")[2]) if ".layers." in name else 0 if "embed" in name else blocks - 1
        spans[block * STAGES // blocks].append((start, stop))
        start = stop
    return spans


class OneSkips(Unrounded):
    """One of the piped replicas has lost its second stage, and runs what is left: blocks only add to hidden states.

    Source: Blagoev et al., "SkipPipe", 2025, arXiv:2502.19913.
    """

    gone: ClassVar[int] = 1  # stage
    first: ClassVar[int] = 3  # rank that has lost it, as those above have
    since: ClassVar[int] = 125  # inner step: a third of the run

    def piped_loss(self, model: LanguageModel, tokens_BT: Tensor, rank: int, step: int) -> Tensor:
        """Return the loss of all blocks or of those that are there."""
        if rank < self.first or step < self.since:
            return super().piped_loss(model, tokens_BT, rank, step)
        return self.loss_without(model, tokens_BT)

    def loss_without(self, model: LanguageModel, tokens_BT: Tensor) -> Tensor:
        """Return the loss of a batch, to which the missing blocks add nothing."""
        each = len(model.model.layers) // STAGES
        kept = [block for at, block in enumerate(model.model.layers) if at // each != self.gone]
        return _loss(_with(model, model=_with(model.model, layers=nn.ModuleList(kept))), tokens_BT)


class BothSkip(OneSkips):
    """Both have."""

    first = 2


class BothSkipThroughout(BothSkip):
    """They never had it."""

    since = 0


class OneDissolves(OneSkips):
    """A replica that has lost a stage trains nothing from then on."""

    def loss_without(self, model: LanguageModel, tokens_BT: Tensor) -> Tensor:
        """Return a loss to which no parameter has a part."""
        return torch.zeros((), requires_grad=True)


class BothDissolve(OneDissolves):
    """Both do."""

    first = 2
