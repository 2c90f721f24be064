"""The model that is being trained, as fragments and buffers, on every process of one peer.

Rank 0 talks to the swarm. The other ranks of an accelerate world wait at every step boundary for what it says. Those
that hold the same parameters (DDP) receive the fragments that changed; where each holds a part of every parameter
(FSDP2, ``fully_shard``), all of them give and take their parts whenever rank 0 reads or writes a fragment. With
fragment 0 come the buffers: rank 0's.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from decentral.errors import ConfigError, DecentralError
from decentral.node.follower import named_tensors
from decentral.parameters import (
    FrozenSpec,
    Schema,
    buffer_spec,
    buffers_of,
    copied,
    frozen_digest,
    gather,
    gather_buffers,
    named_by,
    overwrite,
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
from decentral.tensors.device import PROCESSOR, moved, place_of
from decentral.tensors.memory import fresh
from decentral.tensors.ops import Places, as_rows, is_finite
from decentral.training.copies import Copies, Watch
from decentral.training.inner import Averages
from decentral.training.processes import Order, Orders, Processes, Shards, undisturbed

# Shape suffixes: N = elements of one fragment, on ``place``; B = elements of all buffers, on the CPU; flat float32.


class Accelerator(Protocol):
    """accelerate's, as far as a peer asks it: which of the peer's processes this is."""

    @property
    def is_main_process(self) -> bool:
        """True on the process that talks to the swarm."""
        ...

    @property
    def num_processes(self) -> int:
        """How many this peer has."""
        ...

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        ...

    def unwrap_model(self, model: nn.Module, /) -> nn.Module:
        """The model without what was put around it for several processes."""
        ...


Told = tuple[int, ...]  # whole numbers below 2**63 that all ranks must know alike

MOST_COPIED = 2**24  # values of copies that are shared without being named: 64 MB in each round

logger = logging.getLogger("decentral.training")


class LiveModel:
    """Reads and writes fragments of a model; knows the other ranks through accelerate.

    Of an optimizer that trains at other parameters than it learns, what is read and written is what it learns; the
    caller lets it go on with `Averages.resume`, once for all that a boundary read and wrote.
    """

    def __init__(
        self,
        model: nn.Module,
        num_fragments: int,
        accelerator: Accelerator | None,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        *,
        on_device: bool = False,
        buffers: str = "average",
        moved: Sequence[str] | None = None,
    ) -> None:
        """``on_device``: whether copies of fragments may lie where the model is: see `place_of`. ``buffers``: what the
        run makes of them. ``moved``: parameters that go their way, see `join`.
        """
        self.accelerator, self.averages = accelerator, Averages(optimizers)
        bare = model if accelerator is None else accelerator.unwrap_model(model)
        self._bare = bare
        self._parameters = parameters_of(bare)
        self.orders = Orders(Processes()) if self.world_size > 1 else None
        self._taken_for_copies = ""
        self._moved = named_by(moved, bare) if moved is not None else self._alike(optimizers)
        frozen = {name: p for name, p in self._parameters.items() if not (p.requires_grad or name in self._moved)}
        self._frozen = parts_of(frozen)
        self._shards = self._shared_out(bare)
        self.schema: Schema = schema_of(bare, num_fragments, self._moved)
        self._trained = {spec.name for fragment in self.schema.fragments for spec in fragment.parameters}
        self._joined = Joined(self._parameters, self.schema, sharded=self._shards is not None)
        self._whole = {spec.name for spec in self.schema.buffers if not spec.has_mean}
        self._own, self._own_told = self._whole if buffers == "average" else set(), False
        self._outgrown: set[str] = set()  # buffers that are not of the schema's shape or kind any more
        self._shared_B: Tensor | None = None  # the buffers that were read first or written last
        stepping = [one for one in optimizers if not self.averages.swaps(one)]
        self._copies = Copies(stepping if self._shards is None else ())
        self.watch = Watch(stepping if self._shards is None else (), self.trained, self._copies)
        self._places = [self._found(fragment.names) for fragment in self.schema.fragments]
        whole = on_device and self._shards is None
        self.place = place_of(self.trained.values()) if whole else PROCESSOR  # of what `read` gives

    def _alike(self, optimizers: Sequence[torch.optim.Optimizer]) -> frozenset[str]:
        """Parameters that begin as a copy of trained ones, and that no gradient and no optimizer will train."""
        if any(is_sharded(parameter) for parameter in self._parameters.values()):
            return frozenset()
        stepped = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        wanted = [p for p in self._parameters.values() if p.requires_grad and (id(p) in stepped or not stepped)]
        found = copied(self._bare, {id(parameter) for parameter in wanted})
        names = frozenset(name for inside in found.values() for name in inside)
        if sum(self._parameters[name].numel() for name in names) > MOST_COPIED:
            return frozenset()
        self._taken_for_copies = ", ".join(found) if names else ""
        return names

    def tell_of_copies(self) -> None:
        """Say which modules were taken for copies."""
        if self._taken_for_copies:
            logger.warning(
                "%s begins as a copy of what is trained, and no gradient trains it: it is shared and kept as buffers "
                "are, as by join(moved=[...]); moved=[] does not",
                self._taken_for_copies,
                extra={"plain": True},
            )

    def description(self) -> dict[str, Any] | None:
        """How ``export`` can build the model again; None for one that only its script can build."""
        return description_of(self._bare, self._trained)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within the block the model holds what is contributed of it, in evaluation; modes, buffers and random
        generators are as before afterwards. For where a boundary reads or writes the model anyway, see `Averages`.
        """
        self.averages.show()
        with self._in_evaluation():
            yield

    @contextmanager
    def _in_evaluation(self) -> Iterator[None]:
        """Within the block it is, without gradients; modes, buffers and random generators come back."""
        modes = [(module, module.training) for module in self._bare.modules()]
        # A module may put another tensor in the place of a buffer: the one that was there comes back.
        buffers = [
            (module, name, buffer, buffer.clone())
            for module in self._bare.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        drawn = random_state()
        try:
            with torch.no_grad():
                self._bare.eval()
                yield
        finally:
            set_random_state(drawn)
            for module, training in modes:
                module.training = training
            with torch.no_grad():
                for module, name, buffer, kept in buffers:
                    module._buffers[name] = buffer
                    overwrite(buffer, kept)

    @contextmanager
    def holding(
        self, anchors: Sequence[Tensor] | None, buffers_B: Tensor | None, *, are_shared: bool
    ) -> Iterator[None]:
        """Within the block the model holds these fragments, in evaluation, and these buffers if they ``are_shared``;
        then what it held.

        All processes enter it at once; ``anchors`` and ``buffers_B`` are the main one's. No optimizer knows of it: of
        one that trains at other parameters than it learns, what trains comes back as it was.
        """
        held = [local_part(parameter) for parameter in self.trained.values()] + list(self._moved_now().values())
        kept = [tensor.detach().clone() for tensor in held]
        # As values come back, a backward pass may go on with them, and nobody saw a change: as fully_shard has it.
        unseen = () if self.is_sharded else tuple(self._parameters.values())
        try:
            with self._in_evaluation():
                with _unsafe_preserve_version_counter(unseen):
                    self._hold(anchors, buffers_B, are_shared=are_shared)
                yield
        finally:
            self._reshard()
            with torch.no_grad(), _unsafe_preserve_version_counter(unseen):
                for tensor, before in zip(held, kept, strict=True):
                    tensor.copy_(before)

    def _hold(self, anchors: Sequence[Tensor] | None, buffers_B: Tensor | None, *, are_shared: bool) -> None:
        self._reshard()
        for fragment in self.schema.fragments:
            flat_N = fresh(0) if anchors is None else anchors[fragment.index]
            if self._shards is not None:
                self._shards.write(flat_N, fragment, self._parameters)
            else:
                scatter(self._from_main(flat_N, fragment.numel), fragment, self._here())
        if are_shared and self.schema.buffers:
            shared = {name: buffer for name, buffer in self._fitting().items() if name not in self._own}
            scatter_buffers(self._from_main(buffers_B, self.schema.buffer_numel), self.schema.buffers, shared)

    def _from_main(self, flat: Tensor | None, numel: int) -> Tensor:
        """The main process's values, on all of them."""
        mine = fresh(numel) if flat is None or not flat.numel() else flat.cpu().contiguous()
        if self.orders is not None:
            self.orders.processes.broadcast(mine)
        return mine

    def named(self, anchors: list[Tensor], buffers_B: Tensor | None) -> dict[str, Tensor]:
        """Copies of these fragments and buffers by the model's names, as the model has them, on the processor."""
        mine = {**self._parameters, **self._buffers()}
        named = named_tensors(self.schema, [anchor_N.cpu() for anchor_N in anchors], buffers_B)
        # A buffer that the module has no more is as the run has it.
        return {name: tensor.to(mine.get(name, tensor).dtype, copy=True) for name, tensor in named.items()}

    @property
    def trained(self) -> dict[str, Tensor]:
        """The parameters that fragments are made of, by name."""
        specs = (spec for fragment in self.schema.fragments for spec in fragment.parameters)
        return {spec.name: self._parameters[spec.name] for spec in specs}

    @property
    def is_main(self) -> bool:
        """Whether this process talks to the swarm."""
        return self.accelerator is None or bool(self.accelerator.is_main_process)

    @property
    def world_size(self) -> int:
        """Processes of this peer."""
        return 1 if self.accelerator is None else int(self.accelerator.num_processes)

    @property
    def is_sharded(self) -> bool:
        """Whether each process of this peer holds only a part of the parameters."""
        return self._shards is not None

    def read(self, fragment: int) -> Tensor:
        """A copy of one fragment, on ``place``."""
        with self._undisturbed():
            self._order(Order.READ, fragment)
            return self._read(fragment)

    def _read(self, fragment: int) -> Tensor:
        self.averages.show()
        if self._shards is not None:
            return self._shards.read(self._parameters, self.schema.fragments[fragment])
        if (places := self._small(fragment)) is not None:
            return places.read()
        return gather(self._here(), self.schema.fragments[fragment], self.place)

    def read_all(self) -> list[Tensor]:
        """A copy of every fragment, on the processor."""
        return [moved(self.read(f), PROCESSOR) for f in range(len(self.schema.fragments))]

    def is_finite(self) -> bool:
        """Tell whether no trained parameter holds NaN or Inf; asked on the main process."""
        return all(is_finite(self.read(f)) for f in range(len(self.schema.fragments)))

    def read_alone(self) -> list[Tensor]:
        """A copy of every fragment, between two steps; ConfigError where other processes have parts of them."""
        if self.is_sharded:
            raise ConfigError("peer.anchor(): of a sharded model the main process has it, inside the with block")
        held = self.read_all()
        self.averages.resume()
        return held

    def write(self, fragment: int, flat_N: Tensor) -> None:
        """Overwrite one fragment in place; optimizer state and gradients are not touched."""
        with self._undisturbed():
            self._order(Order.WRITE, fragment)
            self._write(fragment, flat_N)

    def _write(self, fragment: int, flat_N: Tensor) -> None:
        self.averages.show()
        if self._shards is not None:
            self._reshard()
            self._shards.write(flat_N, self.schema.fragments[fragment], self._parameters)
            return
        written = [self._parameters[spec.name] for spec in self.schema.fragments[fragment].parameters]
        with self.watch.writing(written), self._copies.moved(written):
            if (places := self._small(fragment)) is not None:
                places.write(flat_N)
            else:
                scatter(flat_N, self.schema.fragments[fragment], self._here())

    def _reshard(self) -> None:
        """Let no module keep a whole copy of what is written next: the root does after an evaluation."""
        for module in self._bare.modules():
            if (reshard := getattr(module, "reshard", None)) is not None:
                reshard()

    def _here(self) -> dict[str, Tensor]:
        """The parameters as this process holds them: whole."""
        return {name: local_part(parameter) for name, parameter in self._parameters.items()}

    def _small(self, fragment: int) -> Places | None:
        """Where the parameters of a fragment lie now, if they are many and small."""
        known = self._places[fragment]
        if known is not None and not known.hold:
            self._places[fragment] = known = self._found(self.schema.fragments[fragment].names)
        return known

    def _found(self, names: Sequence[str]) -> Places | None:
        held = [self._parameters[name] for name in names]
        return None if any(map(is_sharded, held)) else Places.of(held)

    def keeps(self, fragment: int) -> bool:
        """Whether reading gives the very bits that were written: not where parameters have less than float32."""
        wide = (torch.float32, torch.float64)
        return self._places[fragment] is not None or all(
            self._parameters[spec.name].dtype in wide for spec in self.schema.fragments[fragment].parameters
        )

    def in_place(self, fragment: int) -> Sequence[Tensor] | None:
        """As Parameters say. None of a model that is sharded, not in float32, or not on the processor; of small
        tensors, which are copied sooner than passed over one by one; and where a write is more than that.
        """
        apart = self._shards is not None or self._places[fragment] is not None
        if apart or self._copies.any or not self.watch.over:
            return None
        self.averages.show()
        here = self._here()
        return as_rows(here[spec.name] for spec in self.schema.fragments[fragment].parameters)

    def read_buffers(self) -> Tensor:
        """A copy of all buffers (B,). They are looked up anew: a module may put another tensor in the place of one."""
        found_B = gather_buffers(self._fitting(), self.schema.buffers, self._shared_B)
        self._shared_B = found_B if self._shared_B is None else self._shared_B
        return found_B

    def write_buffers(self, flat_B: Tensor, *, whole: bool = False) -> None:
        """Overwrite the buffers that peers share, in place, each in its own dtype; ``whole``: this peer's own, too."""
        targets = self._fitting()
        if not whole:
            self._tell_of_own(targets, flat_B)
            targets = {name: buffer for name, buffer in targets.items() if name not in self._own}
        self._shared_B = flat_B
        scatter_buffers(flat_B, self.schema.buffers, targets)

    def _fitting(self) -> dict[str, Tensor]:
        """The schema's buffers as they are now, but those that became something else, and the whole numbers beside
        them, which may point into them. That is told once.
        """
        found = self._buffers()
        for spec in self.schema.buffers:
            now = found.get(spec.name)
            if spec.name in self._outgrown or (now is not None and buffer_spec(spec.name, now) == spec):
                continue
            module = spec.name.rpartition(".")[0]
            self._outgrown |= {spec.name} | {name for name in self._whole if name.rpartition(".")[0] == module}
            shape = "is gone" if now is None else f"is {tuple(now.shape)} of {now.dtype} now"
            self._tell(
                f"the buffer {spec.name} was {spec.shape} of {spec.kind}s at the join and {shape}: it is this peer's "
                "own from here on, kept in its checkpoints and sent to nobody; what only this process needs is "
                "registered with persistent=False"
            )
        return {s.name: found[s.name] for s in self.schema.buffers if s.name not in self._outgrown}

    def _tell_of_own(self, targets: Mapping[str, Tensor], flat_B: Tensor) -> None:
        """Say once which whole numbers are not as the others'."""
        if self._own_told or not self._own:
            return
        pieces = split(flat_B, [spec.shape for spec in self.schema.buffers])
        shared = {spec.name: piece for spec, piece in zip(self.schema.buffers, pieces, strict=True)}
        names = [n for n in self._own if n in targets and not torch.equal(targets[n].detach().cpu().float(), shared[n])]
        if names:
            self._own_told = True
            self._tell(
                f"{', '.join(sorted(names))}: whole numbers, of which a mean is nothing, so they are this peer's own; "
                'float buffers beside them are averaged. buffers = "own" in [model] keeps all of them, "first" takes '
                "one peer's"
            )

    def _tell(self, sentence: str) -> None:
        if self.is_main:
            logger.warning("%s", sentence)

    def kept_buffers(self) -> dict[str, Tensor]:
        """Copies of the buffers in their own dtypes, by their names in a checkpoint."""
        return {live_buffer_name(name): buffer.detach().cpu().clone() for name, buffer in self._buffers().items()}

    def restore_buffers(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what ``kept_buffers`` gave; of a buffer that was there then and is not yet now, nothing."""
        for name, buffer in self._buffers().items():
            kept = tensors.get(live_buffer_name(name))
            if kept is not None and buffer_spec(name, kept) == buffer_spec(name, buffer):
                with torch.no_grad():
                    overwrite(buffer, kept)
            elif kept is not None:
                put_buffer(self._bare, name, kept.to(buffer.device, copy=True))

    def frozen(self) -> dict[str, Tensor]:
        """The parameters that were not trained at the join; not to be written to. Sharded ones: see ``whole``."""
        return {spec.name: self._frozen[spec.name].detach() for spec in self.schema.frozen}

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """All of what ``frozen`` gave, one at a time."""
        if self._shards is None:
            return local_part(tensor)
        self._order(Order.FROZEN, [spec.name for spec in self.schema.frozen].index(name))
        found = self._shards.whole(tensor)
        assert found is not None
        return found

    def check_trained(self) -> None:
        """Raise ConfigError where the model is not the one that joined any more: see `Joined`."""
        self._joined.check(parameters_of(self._bare))

    def check_tensors(self) -> None:
        """The same of what is trained alone, between two boundaries."""
        self._joined.check_tensors(parameters_of(self._bare))

    def before_step(self) -> None:
        """Some optimizer is about to step."""
        self._joined.step_begins()

    def _buffers(self) -> dict[str, Tensor]:
        """With the parameters that go their way."""
        return self._moved_now() | buffers_of(self._bare) if self.schema.buffers else {}

    def _moved_now(self) -> dict[str, Tensor]:
        """Looked up anew: a loop may put a copy in the place of a teacher."""
        return {n: p.detach() for n, p in parameters_of(self._bare).items() if n in self._moved} if self._moved else {}

    # ---- the processes of a peer ----

    def _shared_out(self, bare: nn.Module) -> Shards | None:
        """What reads and writes a model that is sharded; None where this process holds all of it."""
        if any(type(module).__name__ == "FullyShardedDataParallel" for module in bare.modules()):
            raise ConfigError(
                "join: FSDP of version 1 hides the parameters' names and shapes, which all peers must have alike; "
                "use version 2 (accelerate: fsdp_version: 2; torch: fully_shard)"
            )
        sharded = [parameter for parameter in self._parameters.values() if is_sharded(parameter)]
        moved = next((name for name in self._moved if is_sharded(self._parameters[name])), None)
        if moved is not None:
            raise ConfigError(
                f"join(moved=...): {moved} is sharded, and what goes the way of buffers is whole on the main process; "
                "leave it out of fully_shard (ignored_params)"
            )
        if not sharded or (self.world_size == 1 and len(boxes_of(sharded[0])) == 1):
            return None
        if self.orders is None:
            raise ConfigError(
                "join: the model is sharded over several processes, and this one knows of no other; pass "
                "join(accelerator=...)"
            )
        shards = Shards(self.orders.processes)
        what = {Order.READ: self._read, Order.WRITE: lambda fragment: self._write(fragment, fresh(0))}
        frozen = {Order.FROZEN: lambda number: shards.whole(self._frozen[self.schema.frozen[number].name])}
        self.orders.means({**what, **frozen})
        return shards

    def _undisturbed(self) -> AbstractContextManager[None]:
        """What several processes do together is not left halfway, by Ctrl-C."""
        return undisturbed() if self._shards is not None else nullcontext()

    def _order(self, order: Order, number: int) -> None:
        if self._shards is not None and self.orders is not None:
            self.orders.give(order, number)

    @contextmanager
    def as_one(self) -> Iterator[None]:
        """What fails in the block on the main process fails on the others, which wait for its word meanwhile."""
        try:
            yield
        except Exception as error:
            self.fail(error)
            raise

    def on_main(self, work: Callable[[], object]) -> None:
        """Do it on the main process; what fails there fails on all of them."""
        if self.is_main:
            with self.as_one():
                work()

    def fail(self, error: BaseException | None) -> None:
        """Have the other processes raise the same where they wait for this one's word, if it is the main one."""
        if self.orders is not None and self.is_main and isinstance(error, Exception):
            self.orders.fail(error)

    def let_go(self, *, interrupted: bool) -> None:
        """The main process leaves, and nothing more is asked of the others."""
        if self.orders is not None:
            self.orders.let_go(interrupted=interrupted)

    def tell(self, word: bytes) -> bytes:
        """Give all processes, which all ask, the main one's ``word``."""
        if self.orders is None:
            return word
        with undisturbed():
            return self.orders.processes.tell_bytes(word)

    def share(self, changed: Iterable[int], done: bool, told: Told) -> tuple[bool, Told]:
        """Bring every rank in step: the changed fragments, whether the run is done, and ``told``.

        Every rank calls it at every step boundary; returns what the main process knows. Raises what `Orders.follow`
        does.
        """
        if self.orders is None:
            return done, told
        with undisturbed():
            if self.is_main:
                self.orders.give(Order.GO_ON)
            elif self.orders.follow() is Order.LEAVE:
                self._left_behind(self.orders.interrupted)
            return self._share(self.orders.processes, changed, done, told)

    def _share(self, processes: Processes, changed: Iterable[int], done: bool, told: Told) -> tuple[bool, Told]:
        first, written = 2 + len(told), set(changed)  # first: of the fragments
        flags = [int(done), int(self.averages.shown), *told]
        flags += [int(fragment.index in written) for fragment in self.schema.fragments]
        flags = processes.tell(flags)
        if flags[1]:
            self.averages.show()  # on every rank alike: to and fro rounds
        self._share_values([f for f, is_changed in enumerate(flags[first:]) if is_changed])
        return bool(flags[0]), tuple(flags[2:first])

    def _left_behind(self, interrupted: bool) -> None:
        if interrupted:
            raise KeyboardInterrupt
        raise DecentralError(
            "the main process of this peer left the run, and this one trains on; end the loop on all of them at once, "
            "when peer.done"
        )

    def _share_values(self, changed: list[int]) -> None:
        from accelerate.utils import broadcast

        assert self.accelerator is not None
        device = self.accelerator.device
        for fragment in changed if self._shards is None else ():
            flat_N = broadcast(self._read(fragment).to(device), from_process=0)
            if not self.is_main:
                self._write(fragment, flat_N.cpu())
        if self.schema.buffers and 0 in changed:
            flat_B = broadcast(self.read_buffers().to(device), from_process=0)
            if not self.is_main:
                self.write_buffers(flat_B.cpu(), whole=True)


# ---- the model that joined ----
#
# At a boundary it is still the same one: what is trained are the same tensors, and what is frozen has the same values.
#
# Values at boundaries count, and not what a loop does with them inside a step: it may freeze a discriminator for a
# moment, or perturb and restore. So a parameter is called frozen once no step since the last boundary found it thawed.
# A frozen base may have billions of values, which are hashed once, at the join. At a boundary so many tensors are
# looked at in turn, at values spread over each, and as many whose version counter rose (an EMA by ``.data`` raises
# none). They may be off by rounding: adapters are merged into a base and taken out again to evaluate or generate.

LOOKED_AT = 256  # frozen tensors at one boundary
SAMPLED = 64  # values of each
ROUNDING = 16.0  # times the dtype's epsilon by which a tensor may be off, in norm


@dataclass(slots=True)
class _Frozen:
    spec: FrozenSpec
    sample: Tensor | None  # None: of a dtype that torch only stores
    sums: Tensor | None  # of all values, in stretches; None: the sample has all of them, or they have no sum
    version: int
    hashed: bool = False  # since the join


class Joined:
    """Remembers it; ``sharded``: of what is frozen this process has parts."""

    def __init__(self, parameters: Mapping[str, Tensor], schema: Schema, *, sharded: bool) -> None:
        trained = [spec.name for fragment in schema.fragments for spec in fragment.parameters]
        self._trained = {name: parameters[name] for name in trained}
        self._shapes = {name: tuple(parameter.shape) for name, parameter in self._trained.items()}
        self._known, self._sharded, self._parameters = set(parameters), sharded, parameters
        # What has adapters on it is peft's, which merges them in and takes them out, not to the bit.
        # The parts of a quantised one (`parts_of`) are no parameters, and nobody moves them.
        watched = [s for s in schema.frozen if ".base_layer." not in s.name and s.name in parameters]
        held = [parameters[spec.name] for spec in watched]
        sums = [None if sharded else _sums(parameter) for parameter in held]
        found = zip(watched, held, sums, strict=True)
        self._frozen = [_Frozen(spec, _sampled(p), sum_, _version(p)) for spec, p, sum_ in found]
        self._turn = 0
        self._still: set[str] = set()  # trained ones, frozen at the last boundary and at every step since
        self._told = False

    def step_begins(self) -> None:
        """Note what is thawed again."""
        if self._still:
            self._still = {name for name in self._still if not self._trained[name].requires_grad}

    def check(self, now: Mapping[str, Tensor]) -> None:
        """ConfigError for another tensor in the place of one, or another value. Warns once of what stays frozen."""
        self.check_tensors(now)
        self._check_values(now)
        frozen = {name for name in self._trained if not now[name].requires_grad}
        if not self._told and (names := sorted(frozen & self._still)):
            self._told = True
            logger.warning(
                "%s, and %d more, took part in training at the join and stayed frozen for a round: their values are "
                "shared as before, so what other peers learn of them still comes in",
                names[0],
                len(names) - 1,
            )
        self._still = frozen

    def check_tensors(self, now: Mapping[str, Tensor]) -> None:
        """ConfigError where what is trained are other tensors than at the join."""
        added = [name for name, parameter in now.items() if parameter.requires_grad and name not in self._known]
        for name, then in self._trained.items():
            found = now.get(name)
            if found is not None and tuple(found.shape) == self._shapes[name] and (found is then or self._sharded):
                continue
            is_what = f"is another tensor of shape {tuple(found.shape)}" if found is not None else "is gone"
            is_what += f" ({added[0]} came)" if found is None and added else ""
            raise ConfigError(
                f"{name} had shape {self._shapes[name]} at the join, and {is_what}: what it learns would reach nobody; "
                "resize, replace or prune parameters before join(), make the optimizer after that, and begin a new run"
            )
        if added:
            raise ConfigError(
                f"{added[0]}, of shape {tuple(now[added[0]].shape)}, came into the model after the join: what it "
                "learns would reach nobody; build the whole model before join(), and begin a new run"
            )

    def _check_values(self, now: Mapping[str, Tensor]) -> None:
        here = self._parameters if self._sharded else now
        risen = [one for one in self._frozen if _version(here.get(one.spec.name)) != one.version]
        begin, self._turn = self._turn, (self._turn + LOOKED_AT) % max(1, len(self._frozen))
        looked_at = risen[:LOOKED_AT] + (self._frozen[begin:] + self._frozen[:begin])[:LOOKED_AT]
        changed = [one.spec.name for one in looked_at if self._is_changed(one, here.get(one.spec.name))]
        thawed = [name for name in changed if now[name].requires_grad and now[name] is self._parameters[name]]
        if thawed:
            raise ConfigError(
                f"{thawed[0]} was not trained when this peer joined and is now: what it learns would reach nobody; "
                "thaw it before join(), and begin a new run: inside the block it may be frozen for as long as you like"
            )
        if changed:
            more = len(set(changed)) - 1
            raise ConfigError(
                f"{changed[0]}{f' (and {more} more)' if more else ''} is frozen, so that all peers have the same, but "
                "changed after the join: newcomers, a restart and the export would have what it was; where the loop "
                "moves it (an EMA, a teacher, a target network, a codebook), begin a new run with "
                f'join(..., moved=["{self._around(changed[0])}"]), and it is shared and kept as buffers are'
            )

    def _is_changed(self, frozen: _Frozen, now: Tensor | None) -> bool:
        """Tell by the sample; where that says nothing and the counter rose, by all values, once."""
        if now is None:
            return False  # a teacher that is not needed any more
        if not self._sharded and tuple(now.shape) != frozen.spec.shape:
            return True
        sample, has_risen = _sampled(now), _version(now) != frozen.version
        frozen.version = _version(now)
        if sample is not None and frozen.sample is not None and not torch.equal(sample, frozen.sample):
            return _is_off(sample, frozen.sample)
        is_all_seen = sample is not None and now.numel() <= SAMPLED
        if not has_risen or frozen.hashed or self._sharded or is_all_seen:
            return False
        frozen.hashed = True
        is_another = frozen_digest(now) != frozen.spec.digest
        return is_another and (frozen.sums is None or _is_off(_sums(now), frozen.sums, of=now))

    def _around(self, name: str) -> str:
        """The largest module around a parameter in which nothing is trained; else its own name."""
        words = name.split(".")
        arounds = (".".join(words[:count]) for count in range(1, len(words) + 1))
        return next(one for one in arounds if not any(t.startswith(f"{one}.") for t in self._trained))


def _version(tensor: Tensor | None) -> int:
    """The count of changes to its values in place, by whomever; -1 where there is none."""
    return -1 if tensor is None or tensor.is_inference() else tensor._version


def _sampled(tensor: Tensor) -> Tensor | None:
    held = local_part(tensor)
    if held.device.type == "meta" or not held.numel():
        return None
    try:
        at = torch.arange(0, held.numel(), -(-held.numel() // SAMPLED), dtype=torch.int64, device=held.device)
        return torch.take(held, at).cpu()
    except (RuntimeError, TypeError):  # NotImplementedError is one: a quantised one, or float8
        return None


def _sums(tensor: Tensor) -> Tensor | None:
    """Sums of as many stretches as a sample has values: they move as far as the values do, in norm, and by rounding
    hardly.
    """
    if tensor.numel() <= SAMPLED or not tensor.is_floating_point():
        return None
    flat, exact = tensor.detach().reshape(-1), torch.float32 if tensor.device.type == "mps" else torch.float64
    whole = flat.numel() // SAMPLED * SAMPLED
    try:
        rows, rest = flat[:whole].view(SAMPLED, -1), flat[whole:]
        return torch.cat([rows.sum(1, dtype=exact), rest.sum(dtype=exact).view(1)]).cpu()
    except (RuntimeError, TypeError):  # as above
        return None


def _is_off(now: Tensor | None, then: Tensor, of: Tensor | None = None) -> bool:
    """Tell whether values, or sums ``of`` values, are farther apart than rounding brings them."""
    if now is None or now.dtype != then.dtype or not now.is_floating_point():
        return True
    moved = torch.linalg.vector_norm(now.double() - then.double())
    whole = then if of is None else of.detach()
    long = torch.linalg.vector_norm(whole.float() if whole.dtype != torch.float64 else whole).cpu()
    return bool(moved > ROUNDING * torch.finfo(whole.dtype).eps * long)


# ---- a description for exports ----
#
# A checkpoint has it, so that ``export`` can write a folder that others open.


def description_of(bare: nn.Module, trained: Iterable[str]) -> dict[str, Any] | None:  # Any: JSON
    """A transformers configuration, adapters of peft by theirs; None for a model that only its script can build."""
    if isinstance(bare, nn.DataParallel | nn.parallel.DistributedDataParallel):
        bare = bare.module
    if type(bare).__module__.startswith("peft."):
        return _of_adapters(bare, trained)
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


def _of_adapters(bare: Any, trained: Iterable[str]) -> dict[str, Any] | None:  # Any: peft may not be here
    active = bare.active_adapter
    if not isinstance(active, str):  # several at once
        return None
    found = adapter_description(bare.peft_config[active].to_dict(), active, trained)
    return None if found is None else dict(json.loads(json.dumps(found, default=str)))
