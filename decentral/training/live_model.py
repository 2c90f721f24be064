"""The model that is being trained, as fragments and buffers, on every process of one peer.

Rank 0 talks to the swarm. The other ranks of an accelerate world wait at every step boundary for its word. Those that
hold the same parameters (DDP) receive the fragments that changed; where each holds a part of every parameter (FSDP2,
``fully_shard``), all of them give and take their parts whenever rank 0 reads or writes a fragment. With fragment 0 come
the buffers: rank 0's.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from decentral.errors import ConfigError
from decentral.node.follower import name_tensors
from decentral.parameters import (
    Fragment,
    Layout,
    Schema,
    buffer_spec,
    buffers_of,
    gather,
    gather_buffers,
    overwrite,
    parameters_named,
    parameters_of,
    parts_of,
    put_buffer,
    scatter,
    scatter_buffers,
    schema_of,
    split,
)
from decentral.parameters.schema import boxes_of, is_sharded, local_part
from decentral.state.checkpoint import adapter_description, random_state, set_random_state
from decentral.state.snapshot import live_buffer_name
from decentral.tensors.device import PROCESSOR, place_of, to_device
from decentral.tensors.memory import fresh
from decentral.tensors.ops import Places, as_rows
from decentral.training.copies import Averages, Copies, UndoGuard
from decentral.training.joined import Joined, find_copies
from decentral.training.part import Borrowed
from decentral.training.processes import Accelerator, Order, Orders, Processes, Shards, Team, hold_interrupts

# Shape suffixes: N = elements of one fragment, on ``place``; B = elements of all buffers, on the CPU; flat float32.


logger = logging.getLogger("decentral.training")


class LiveModel:
    """The trained parameters of a model, read and written by fragments while a loop trains them.

    Beside it: its ``buffers``; ``joined``, to compare it with the model that joined; the ``team`` of processes that
    have it. Of an optimizer that trains at other parameters than it learns, the learnt ones are read and written; the
    caller lets it go on with `Averages.resume`, once for all that a boundary read and wrote.
    """

    def __init__(
        self,
        model: nn.Module,
        num_fragments: int,
        accelerator: Accelerator | None,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        *,
        layout: Layout = "strided",
        on_device: bool = False,
        buffers: str = "average",
        moved: Sequence[str] | None = None,
    ) -> None:
        """``layout``: of fragments, see `schema_of`. ``on_device``: whether copies of them may lie where the model is:
        see `place_of`. ``buffers``: how the run makes shared ones of the peers'. ``moved``: parameters that the loop
        moves itself, see `join`.
        """
        self.team, self.averages = Team(accelerator), Averages(optimizers)
        bare = model if accelerator is None else accelerator.unwrap_model(model)
        self.bare = bare
        self._parameters = parameters_of(bare)
        by_loop, copies = (
            (parameters_named(moved, bare), "")
            if moved is not None
            else find_copies(bare, self._parameters, optimizers)
        )
        frozen = {name: p for name, p in self._parameters.items() if not (p.requires_grad or name in by_loop)}
        self._frozen = parts_of(frozen)
        self.is_sharded = is_in_parts(bare, self._parameters, by_loop, self.team)
        self.schema: Schema = schema_of(bare, num_fragments, by_loop, layout)
        self.joined = Joined(bare, self.schema, sharded=self.is_sharded, copies=copies)
        self.buffers = LiveBuffers(bare, self.schema, by_loop, averaged=buffers == "average", warn=self._warn)
        self._fragments: ShardedFragments | WholeFragments
        if self.is_sharded and self.team.orders is not None:
            held = [self._frozen[spec.name] for spec in self.schema.frozen]
            self._fragments = ShardedFragments(
                bare, self._parameters, self.schema, held, self.averages, self.team.orders
            )
        else:
            stepping = [one for one in optimizers if not self.averages.swaps(one)]
            place = place_of(self.trained.values()) if on_device else PROCESSOR
            self._fragments = WholeFragments(self._parameters, self.schema, stepping, self.averages, place)
        self.undo_guard = self._fragments.undo_guard
        self.borrowed = Borrowed(self._parameters, ())
        self._untrained: list[str] = []  # names of parameters, of a peer that trains a part

    @property
    def trained(self) -> dict[str, Tensor]:
        """The parameters that fragments are made of, by name."""
        return {name: self._parameters[name] for fragment in self.schema.fragments for name in fragment.names}

    def by_name(self, anchors: list[Tensor], buffers_B: Tensor | None) -> dict[str, Tensor]:
        """Copies of these fragments and buffers by the model's names, as the model has them, on the processor."""
        mine = {**self._parameters, **self.buffers.current()}
        named = name_tensors(self.schema, [anchor_N.cpu() for anchor_N in anchors], buffers_B)
        # A buffer that the module has no more is as the run has it.
        return {name: tensor.to(mine.get(name, tensor).dtype, copy=True) for name, tensor in named.items()}

    def check_trained(self) -> None:
        """Raise ConfigError where the model is not the one that joined any more: see `Joined`."""
        self.joined.check()
        self.borrowed.check()

    def train_only(self, part: range) -> None:
        """Train these fragments, and have the values of the others from what is written next, without memory of their
        own where they can lie there: float32, on the processor. No gradient of theirs is made any more, so that an
        optimizer keeps no moments of them.
        """
        mine = [fragment for fragment in self.schema.fragments if fragment.index in part]
        others = [fragment for fragment in self.schema.fragments if fragment.index not in part]
        self.borrowed.own(mine)
        for name in self._untrained:
            self._parameters[name].requires_grad_(True)
        self._untrained = [name for fragment in others for name in fragment.names]
        for name in self._untrained:
            self._parameters[name].requires_grad_(False)
            self._parameters[name].grad = None
        self.joined.expect_frozen(self._untrained)
        assert isinstance(self._fragments, WholeFragments), "of one process, as is checked before"
        self.borrowed = self._fragments.borrow(others)

    @property
    def untrained(self) -> list[Tensor]:
        """The parameters that this peer does not train, for want of memory."""
        return [self._parameters[name] for name in self._untrained]

    def train_all(self) -> None:
        """Leave a model that owns all of its parameters, and trains them, to whoever goes on with it."""
        self.borrowed.own(self.schema.fragments)
        for parameter in self.untrained:
            parameter.requires_grad_(True)
        self._untrained = []

    # ---- reading and writing ----

    def read(self, fragment: int) -> Tensor:
        """Copy one fragment, to where copies of fragments may lie."""
        return self._fragments.read(fragment)

    def read_all(self) -> list[Tensor]:
        """Copy every fragment, to the processor."""
        return [to_device(self.read(f), PROCESSOR) for f in range(len(self.schema.fragments))]

    def hand_over(self) -> list[Tensor]:
        """Copy every fragment, to the processor, one after the other: what is not trained lies in its copy then."""
        held = []
        for fragment in range(len(self.schema.fragments)):
            held.append(to_device(self.read(fragment), PROCESSOR))
            if fragment in self.borrowed:
                self.borrowed.lend(fragment, held[-1])
        return held

    def write(self, fragment: int, flat_N: Tensor) -> None:
        """Overwrite one fragment in place; optimizer state and gradients are not touched."""
        self._fragments.write(fragment, flat_N)

    def read_buffers(self) -> Tensor:
        """Copy all buffers (B,)."""
        return self.buffers.read()

    def write_buffers(self, flat_B: Tensor) -> None:
        """Overwrite the buffers that peers share."""
        self.buffers.write(flat_B)

    def keeps(self, fragment: int) -> bool:
        """Tell whether reading gives the very bits that were written: not where parameters have less than float32."""
        wide = (torch.float32, torch.float64)
        return all(self._parameters[name].dtype in wide for name in self.schema.fragments[fragment].names)

    def in_place(self, fragment: int) -> Sequence[Tensor] | None:
        """Return the parameters of one fragment where they lie, as `Parameters` says."""
        return self._fragments.in_place(fragment)

    def frozen_parts(self) -> dict[str, Tensor]:
        """Return the parameters that were not trained at the join, to be read only; sharded: `whole_frozen`."""
        return {spec.name: self._frozen[spec.name].detach() for spec in self.schema.frozen}

    def whole_frozen(self, name: str, tensor: Tensor) -> Tensor:
        """Collect all of a tensor that ``frozen_parts`` gave."""
        return self._fragments.whole_frozen([spec.name for spec in self.schema.frozen].index(name), tensor)

    # ---- evaluation ----

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within the block the model holds what is contributed of it, in evaluation; modes, buffers and random
        generators are as before afterwards. For where a boundary reads or writes the model anyway, see `Averages`.
        """
        self.averages.show()
        with in_evaluation(self.bare):
            yield

    @contextmanager
    def holding(
        self, anchors: Sequence[Tensor] | None, buffers_B: Tensor | None, *, are_shared: bool
    ) -> Iterator[None]:
        """Within the block the model holds these fragments, in evaluation, and these buffers if they ``are_shared``;
        then it holds its own again.

        All processes enter it at once; ``anchors`` and ``buffers_B`` are the main one's. No optimizer knows of it: of
        one that trains at other parameters than it learns, the trained ones come back as they were.
        """
        borrowed = self.borrowed.values()
        held = [local_part(parameter) for name, parameter in self.trained.items() if name not in borrowed]
        held += self.buffers.loop_parameters().values()
        before = [tensor.detach().clone() for tensor in held]
        # As values come back, a backward pass may go on with them, and nobody saw a change: as fully_shard has it.
        unseen = () if self.is_sharded else tuple(self._parameters.values())
        try:
            with in_evaluation(self.bare):
                with _unsafe_preserve_version_counter(unseen):
                    self._hold(anchors, buffers_B, are_shared=are_shared)
                yield
        finally:
            reshard(self.bare)
            with torch.no_grad(), _unsafe_preserve_version_counter(unseen):
                for tensor, value in zip(held, before, strict=True):
                    tensor.copy_(value)
                self.borrowed.put_back(borrowed)

    def _hold(self, anchors: Sequence[Tensor] | None, buffers_B: Tensor | None, *, are_shared: bool) -> None:
        reshard(self.bare)
        for fragment in self.schema.fragments:
            flat_N = fresh(0) if anchors is None else anchors[fragment.index]
            flat_N = flat_N if self.is_sharded else self.team.from_main(flat_N, fragment.numel)
            self._fragments.lend(fragment.index, flat_N)
        if are_shared and self.schema.buffers:
            self.buffers.lend(lambda: self.team.from_main(buffers_B, self.schema.buffer_numel))

    # ---- the processes of a peer ----

    def share(self, changed: Iterable[int], done: bool, numbers: tuple[int, ...]) -> tuple[bool, tuple[int, ...]]:
        """Bring every rank in step: the changed fragments, whether the run is done, and ``numbers`` below 2**63.

        Every rank calls it at every step boundary; returns what the main process knows. Raises what `Team.go_on` does.
        """
        if self.team.orders is None:
            return done, numbers
        with hold_interrupts():
            return self._share(self.team.go_on(), changed, done, numbers)

    def _share(
        self, processes: Processes, changed: Iterable[int], done: bool, numbers: tuple[int, ...]
    ) -> tuple[bool, tuple[int, ...]]:
        first, written = 2 + len(numbers), set(changed)  # first: of the fragments
        flags = [int(done), int(self.averages.shown), *numbers]
        flags += [int(fragment.index in written) for fragment in self.schema.fragments]
        flags = processes.tell(flags)
        if flags[1]:
            self.averages.show()  # on every rank alike: to and fro rounds
        self._share_values([f for f, is_changed in enumerate(flags[first:]) if is_changed])
        return bool(flags[0]), tuple(flags[2:first])

    def _share_values(self, changed: list[int]) -> None:
        from accelerate.utils import broadcast

        device, is_main = self.team.device, self.team.is_main
        for fragment in () if self.is_sharded else changed:
            flat_N = broadcast(self.read(fragment).to(device), from_process=0)
            if not is_main:
                self.write(fragment, flat_N.cpu())
        if self.schema.buffers and 0 in changed:
            flat_B = broadcast(self.read_buffers().to(device), from_process=0)
            if not is_main:
                self.buffers.write(flat_B.cpu(), whole=True)

    def _warn(self, sentence: str) -> None:
        if self.team.is_main:
            logger.warning("%s", sentence)


# ---- the fragments of a model ----


class WholeFragments:
    """The fragments of a model that this process has whole; copies that optimizers keep of them are written along."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        schema: Schema,
        optimizers: Sequence[torch.optim.Optimizer],
        averages: Averages,
        place: torch.device,
    ) -> None:
        """``place``: of what ``read`` gives."""
        self._parameters, self._fragments, self._averages, self._place = parameters, schema.fragments, averages, place
        self._copies = Copies(optimizers)
        trained = {name: parameters[name] for fragment in schema.fragments for name in fragment.names}
        self.undo_guard = UndoGuard(optimizers, trained, self._copies)
        self._places = [small_places(parameters, fragment.names) for fragment in schema.fragments]
        self._borrowed = Borrowed(parameters, ())

    def read(self, fragment: int) -> Tensor:
        """Copy one."""
        self._averages.show()
        if (places := self._small(fragment)) is not None:
            return places.read()
        return gather(self._here(), self._fragments[fragment], self._place)

    def write(self, fragment: int, flat_N: Tensor) -> None:
        """Overwrite one, and the copies of it."""
        self._averages.show()
        if fragment in self._borrowed:
            self._borrowed.check()  # before what was changed is let go
            self._borrowed.lend(fragment, flat_N)
            return
        written = [self._parameters[name] for name in self._fragments[fragment].names]
        with self.undo_guard.writing(written), self._copies.following(written):
            if (places := self._small(fragment)) is not None:
                places.write(flat_N)
            else:
                self.lend(fragment, flat_N)

    def lend(self, fragment: int, flat_N: Tensor) -> None:
        """Overwrite one for a moment, of which no optimizer knows."""
        if fragment in self._borrowed:
            self._borrowed.lend(fragment, flat_N)
        else:
            scatter(flat_N, self._fragments[fragment], self._here())

    def borrow(self, others: Sequence[Fragment]) -> Borrowed:
        """Have the parameters of ``others`` borrow what is written, and look at no optimizer's copies of them."""
        self._borrowed = Borrowed(self._parameters, others)
        untrained = {name for fragment in others for name in fragment.names}
        names = (name for fragment in self._fragments for name in fragment.names if name not in untrained)
        mine = {name: self._parameters[name] for name in names}
        self.undo_guard.look_at(mine)
        return self._borrowed

    def in_place(self, fragment: int) -> Sequence[Tensor] | None:
        """Return the parameters of one where they lie; None of a model that is not in float32, or not on the processor;
        of small tensors, which are copied sooner than passed over one by one; and where a write has to reach more, or
        less.
        """
        if self._places[fragment] is not None or self._copies.any or not self.undo_guard.over:
            return None
        if fragment in self._borrowed:  # what lies there is others' memory, too
            return None
        self._averages.show()
        here = self._here()
        return as_rows(here[name] for name in self._fragments[fragment].names)

    def whole_frozen(self, number: int, tensor: Tensor) -> Tensor:
        """Return the values of a parameter that is not trained."""
        return local_part(tensor)

    def _here(self) -> dict[str, Tensor]:
        """Return the parameters as this process holds them: whole."""
        return {name: local_part(parameter) for name, parameter in self._parameters.items()}

    def _small(self, fragment: int) -> Places | None:
        """Say where the parameters of a fragment lie now, if they are many and small."""
        known = self._places[fragment]
        if known is not None and not known.hold:
            self._places[fragment] = known = small_places(self._parameters, self._fragments[fragment].names)
        return known


class ShardedFragments:
    """The fragments of a model of which each process has a part: all act whenever the main one reads or writes."""

    def __init__(
        self,
        bare: nn.Module,
        parameters: Mapping[str, Tensor],
        schema: Schema,
        frozen: Sequence[Tensor],
        averages: Averages,
        orders: Orders,
    ) -> None:
        self._bare, self._parameters, self._fragments, self._averages = bare, parameters, schema.fragments, averages
        self._orders, self._shards = orders, Shards(orders.processes)
        self.undo_guard = UndoGuard((), {}, Copies())
        orders.means(
            {
                Order.READ: self._read,
                Order.WRITE: lambda fragment: self._write(fragment, fresh(0)),
                Order.FROZEN: lambda number: self._shards.whole(frozen[number]),
            }
        )

    def read(self, fragment: int) -> Tensor:
        """Collect one, on the main process."""
        with hold_interrupts():  # several processes act together, which is not left halfway
            self._orders.give(Order.READ, fragment)
            return self._read(fragment)

    def write(self, fragment: int, flat_N: Tensor) -> None:
        """Spread one from the main process."""
        with hold_interrupts():
            self._orders.give(Order.WRITE, fragment)
            self._write(fragment, flat_N)

    def lend(self, fragment: int, flat_N: Tensor) -> None:
        """Overwrite one for a moment, on all processes, which all call it."""
        self._shards.write(flat_N, self._fragments[fragment], self._parameters)

    def in_place(self, fragment: int) -> None:
        """None."""

    def whole_frozen(self, number: int, tensor: Tensor) -> Tensor:
        """Collect a parameter that is not trained, the schema's ``number``-th, on the main process."""
        self._orders.give(Order.FROZEN, number)
        found = self._shards.whole(tensor)
        assert found is not None
        return found

    def _read(self, fragment: int) -> Tensor:
        self._averages.show()
        return self._shards.read(self._parameters, self._fragments[fragment])

    def _write(self, fragment: int, flat_N: Tensor) -> None:
        self._averages.show()
        reshard(self._bare)
        self.lend(fragment, flat_N)


def is_in_parts(bare: nn.Module, parameters: Mapping[str, Tensor], by_loop: Iterable[str], team: Team) -> bool:
    """Tell whether each process of this peer holds only a part of the parameters. ConfigError where they cannot act as
    one.
    """
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in bare.modules()):
        raise ConfigError(
            "join: FSDP of version 1 hides the parameters' names and shapes, which all peers must have alike; "
            "use version 2 (accelerate: fsdp_version: 2; torch: fully_shard)"
        )
    sharded = [parameter for parameter in parameters.values() if is_sharded(parameter)]
    in_parts = next((name for name in by_loop if is_sharded(parameters[name])), None)
    if in_parts is not None:
        raise ConfigError(
            f"join(moved=...): {in_parts} is sharded, and what goes the way of buffers is whole on the main "
            "process; leave it out of fully_shard (ignored_params)"
        )
    if not sharded or (team.size == 1 and len(boxes_of(sharded[0])) == 1):
        return False
    if team.orders is None:
        raise ConfigError(
            "join: the model is sharded over several processes, and this one knows of no other; pass "
            "join(accelerator=...)"
        )
    return True


def small_places(parameters: Mapping[str, Tensor], names: Sequence[str]) -> Places | None:
    """Return where parameters lie, if they are many and small, and whole here."""
    held = [parameters[name] for name in names]
    return None if any(map(is_sharded, held)) else Places.of(held)


def reshard(bare: nn.Module) -> None:
    """Let no module keep a whole copy of parameters that are written next: the root does after an evaluation."""
    for module in bare.modules():
        if (reshard_one := getattr(module, "reshard", None)) is not None:
            reshard_one()


@contextmanager
def in_evaluation(bare: nn.Module) -> Iterator[None]:
    """Within the block a model is in evaluation, without gradients; modes, buffers and random generators come back."""
    modes = [(module, module.training) for module in bare.modules()]
    # A module may put another tensor in the place of a buffer: the one that was there comes back.
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in bare.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    drawn = random_state()
    try:
        with torch.no_grad():
            bare.eval()
            yield
    finally:
        set_random_state(drawn)
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer
                overwrite(buffer, value)


class LiveBuffers:
    """The buffers of the model, with the parameters that the loop moves itself: shared, kept, given back.

    They are looked up anew each time: a module may put another tensor in the place of one, as a loop may put a copy in
    the place of a teacher. A buffer that became something else than the schema has is this peer's own from then on.
    """

    def __init__(
        self, bare: nn.Module, schema: Schema, by_loop: Iterable[str], *, averaged: bool, warn: Callable[[str], None]
    ) -> None:
        """``averaged``: the run's are means, so that those without a mean are each peer's own."""
        self._bare, self._schema, self._by_loop, self._warn = bare, schema, frozenset(by_loop), warn
        self._whole_numbers = {spec.name for spec in schema.buffers if not spec.has_mean}
        self._own = self._whole_numbers if averaged else set()
        self._has_warned_of_own = False
        self._outgrown: set[str] = set()  # not of the schema's shape or kind any more
        self._shared_B: Tensor | None = None  # the buffers that were read first or written last

    def read(self) -> Tensor:
        """Copy all buffers (B,)."""
        found_B = gather_buffers(self._fitting(), self._schema.buffers, self._shared_B)
        self._shared_B = found_B if self._shared_B is None else self._shared_B
        return found_B

    def write(self, flat_B: Tensor, *, whole: bool = False) -> None:
        """Overwrite the buffers that peers share, in place, each in its own dtype; ``whole``: this peer's own, too."""
        targets = self._fitting()
        if not whole:
            self._warn_of_own(targets, flat_B)
            targets = {name: buffer for name, buffer in targets.items() if name not in self._own}
        self._shared_B = flat_B
        scatter_buffers(flat_B, self._schema.buffers, targets)

    def lend(self, take_B: Callable[[], Tensor]) -> None:
        """Overwrite the buffers that peers share for a moment: the next `read` and `write` know nothing of it."""
        shared = {name: buffer for name, buffer in self._fitting().items() if name not in self._own}
        scatter_buffers(take_B(), self._schema.buffers, shared)

    def copies(self) -> dict[str, Tensor]:
        """Copy the buffers in their own dtypes, by their names in a checkpoint."""
        return {live_buffer_name(name): buffer.detach().cpu().clone() for name, buffer in self.current().items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back the ``copies``; of a buffer that was there then and is not yet now, nothing."""
        for name, buffer in self.current().items():
            before = tensors.get(live_buffer_name(name))
            if before is not None and buffer_spec(name, before) == buffer_spec(name, buffer):
                with torch.no_grad():
                    overwrite(buffer, before)
            elif before is not None:
                put_buffer(self._bare, name, before.to(buffer.device, copy=True))

    def current(self) -> dict[str, Tensor]:
        """Look them up, with the parameters that the loop moves."""
        return self.loop_parameters() | buffers_of(self._bare) if self._schema.buffers else {}

    def loop_parameters(self) -> dict[str, Tensor]:
        """Look up the parameters that the loop moves."""
        if not self._by_loop:
            return {}
        return {name: p.detach() for name, p in parameters_of(self._bare).items() if name in self._by_loop}

    def _fitting(self) -> dict[str, Tensor]:
        """Return the schema's buffers as they are now, but those that became something else, and the whole numbers
        beside them, which may point into them. A warning says so once.
        """
        found = self.current()
        for spec in self._schema.buffers:
            now = found.get(spec.name)
            if spec.name in self._outgrown or (now is not None and buffer_spec(spec.name, now) == spec):
                continue
            module = spec.name.rpartition(".")[0]
            self._outgrown |= {spec.name} | {n for n in self._whole_numbers if n.rpartition(".")[0] == module}
            shape = "is gone" if now is None else f"is {tuple(now.shape)} of {now.dtype} now"
            self._warn(
                f"the buffer {spec.name} was {spec.shape} of {spec.kind}s at the join and {shape}: it is this peer's "
                "own from here on, kept in its checkpoints and sent to nobody; what only this process needs is "
                "registered with persistent=False"
            )
        return {s.name: found[s.name] for s in self._schema.buffers if s.name not in self._outgrown}

    def _warn_of_own(self, targets: Mapping[str, Tensor], flat_B: Tensor) -> None:
        """Say once which whole numbers are not as the others'."""
        if self._has_warned_of_own or not self._own:
            return
        pieces = split(flat_B, [spec.shape for spec in self._schema.buffers])
        shared = {spec.name: piece for spec, piece in zip(self._schema.buffers, pieces, strict=True)}
        names = [n for n in self._own if n in targets and not torch.equal(targets[n].detach().cpu().float(), shared[n])]
        if names:
            self._has_warned_of_own = True
            self._warn(
                f"{', '.join(sorted(names))}: whole numbers, of which a mean is nothing, so they are this peer's own; "
                'float buffers beside them are averaged. buffers = "own" in [model] keeps all of them, "first" takes '
                "one peer's"
            )


# ---- a description for exports ----
#
# A checkpoint has it, so that ``export`` can write a folder that others open.


def description_of(bare: nn.Module, trained: Iterable[str]) -> dict[str, Any] | None:  # Any: JSON
    """Describe a model by its transformers configuration, adapters of peft by theirs; None for any other."""
    if isinstance(bare, nn.DataParallel | nn.parallel.DistributedDataParallel):
        bare = bare.module
    if type(bare).__module__.startswith("peft."):
        return _describe_adapters(bare, trained)
    config = getattr(bare, "config", None)
    if config is None or not hasattr(config, "to_json_string"):
        return None
    if any(".base_layer." in name for name, _ in bare.named_parameters()):
        return None  # adapters that transformers put in: its folder would be opened without them
    document = json.loads(config.to_json_string())
    is_theirs = type(bare).__module__.startswith("transformers.")
    if is_theirs and not document.get("architectures"):  # they write it when they save a model, as nobody did here
        document["architectures"] = [type(bare).__name__]
    return {"task": "causal-lm", "config": document}


def _describe_adapters(bare: Any, trained: Iterable[str]) -> dict[str, Any] | None:  # Any: peft may not be here
    active = bare.active_adapter
    if not isinstance(active, str):  # several at once
        return None
    found = adapter_description(bare.peft_config[active].to_dict(), active, trained)
    return None if found is None else dict(json.loads(json.dumps(found, default=str)))
