"""The model that is being trained, as fragments and buffers, on every process of one peer.

Rank 0 talks to the swarm. The other ranks of an accelerate world wait at every step boundary for what it says. Those
that hold the same parameters (DDP) receive the fragments that changed; where each holds a part of every parameter
(FSDP2, ``fully_shard``), all of them give and take their parts whenever rank 0 reads or writes a fragment. With
fragment 0 come the buffers: rank 0's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from decentral.errors import ConfigError, DecentralError
from decentral.parameters import (
    Schema,
    buffers_of,
    gather,
    gather_buffers,
    parameters_of,
    scatter,
    scatter_buffers,
    schema_of,
)
from decentral.parameters.schema import boxes_of, is_sharded, local_part
from decentral.state.checkpoint import adapter_description, random_state, set_random_state
from decentral.state.snapshot import live_buffer_name
from decentral.tensors.device import PROCESSOR, moved, place_of
from decentral.tensors.ops import Places, as_rows
from decentral.training.inner import Averages
from decentral.training.processes import Order, Orders, Processes, Shards, undisturbed

# Shape suffixes: N = elements of one fragment, on ``place``; B = elements of all buffers, on the CPU; flat float32.

Told = tuple[int, ...]  # whole numbers below 2**63 that all ranks must know alike


class LiveModel:
    """Reads and writes fragments of a model; knows the other ranks through accelerate.

    Of an optimizer that trains at other parameters than it learns, what is read and written is what it learns; the
    caller lets it go on with `Averages.resume`, once for all that a boundary read and wrote.
    """

    def __init__(
        self,
        model: nn.Module,
        num_fragments: int,
        accelerator: Any | None,  # Any: accelerate is untyped
        optimizers: Sequence[torch.optim.Optimizer] = (),
        *,
        on_device: bool = False,
    ) -> None:
        """``on_device``: whether copies of fragments may lie where the model is: see `place_of`."""
        self.accelerator, self.averages = accelerator, Averages(optimizers)
        bare = model if accelerator is None else accelerator.unwrap_model(model)
        self._bare = bare
        self._parameters = parameters_of(bare)
        self.orders = Orders(Processes()) if self.world_size > 1 else None
        self._shards = self._shared_out(bare)
        self.schema: Schema = schema_of(bare, num_fragments)
        self._trained = {spec.name for fragment in self.schema.fragments for spec in fragment.parameters}
        self._places = [self._found(fragment.names) for fragment in self.schema.fragments]
        whole = on_device and self._shards is None
        self.place = place_of(self.trained.values()) if whole else PROCESSOR  # of what `read` gives

    def description(self) -> dict[str, Any] | None:
        """How ``export`` can build the model again; None for one that only its script can build."""
        return description_of(self._bare, self._trained)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within the block the model holds what is contributed of it, in evaluation; modes, buffers and random
        generators are as before afterwards. For where a boundary reads or writes the model anyway, see `Averages`.
        """
        self.averages.show()
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
                    buffer.copy_(kept)

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
        elif (places := self._small(fragment)) is not None:
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
        """See Parameters: None of a model that is sharded, not in float32, not on the processor, or in small tensors,
        of which a copy is made sooner than a pass over each.
        """
        if self._shards is not None or self._places[fragment] is not None:
            return None
        self.averages.show()
        here = self._here()
        return as_rows(here[spec.name] for spec in self.schema.fragments[fragment].parameters)

    def read_buffers(self) -> Tensor:
        """A copy of all buffers (B,). They are looked up anew: a module may put another tensor in the place of one."""
        return gather_buffers(self._buffers(), self.schema.buffers)

    def write_buffers(self, flat_B: Tensor) -> None:
        """Overwrite all buffers in place, each in its own dtype."""
        scatter_buffers(flat_B, self.schema.buffers, self._buffers())

    def kept_buffers(self) -> dict[str, Tensor]:
        """Copies of the buffers in their own dtypes, by their names in a checkpoint."""
        return {live_buffer_name(name): buffer.detach().cpu().clone() for name, buffer in self._buffers().items()}

    def restore_buffers(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what ``kept_buffers`` gave."""
        with torch.no_grad():
            for name, buffer in self._buffers().items():
                buffer.copy_(tensors[live_buffer_name(name)])

    def frozen(self) -> dict[str, Tensor]:
        """The parameters that were not trained at the join; not to be written to. Sharded ones: see ``whole``."""
        return {spec.name: self._parameters[spec.name].detach() for spec in self.schema.frozen}

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """All of what ``frozen`` gave, one at a time."""
        if self._shards is None:
            return local_part(tensor)
        self._order(Order.FROZEN, [spec.name for spec in self.schema.frozen].index(name))
        found = self._shards.whole(tensor)
        assert found is not None
        return found

    def check_trained(self) -> None:
        """Raise ConfigError when other parameters are trained than at the join: the others know of no such change."""
        for name, parameter in parameters_of(self._bare).items():
            if parameter.requires_grad != (name in self._trained):
                then, now = ("not trained", "is now") if parameter.requires_grad else ("trained", "is frozen now")
                raise ConfigError(
                    f"{name} was {then} when this peer joined and {now}: what it learns would reach nobody, or its "
                    "digest is of other values; choose what is trained before join(), and a run for each choice"
                )

    def _buffers(self) -> dict[str, Tensor]:
        return buffers_of(self._bare) if self.schema.buffers else {}

    # ---- the processes of a peer ----

    def _shared_out(self, bare: nn.Module) -> Shards | None:
        """What reads and writes a model that is sharded; None where this process holds all of it."""
        if any(type(module).__name__ == "FullyShardedDataParallel" for module in bare.modules()):
            raise ConfigError(
                "join: FSDP of version 1 hides the parameters' names and shapes, which all peers must have alike; "
                "use version 2 (accelerate: fsdp_version: 2; torch: fully_shard)"
            )
        sharded = [parameter for parameter in self._parameters.values() if is_sharded(parameter)]
        if not sharded or (self.world_size == 1 and len(boxes_of(sharded[0])) == 1):
            return None
        if self.orders is None:
            raise ConfigError(
                "join: the model is sharded over several processes, and this one knows of no other; pass "
                "join(accelerator=...)"
            )
        shards = Shards(self.orders.processes)
        what = {Order.READ: self._read, Order.WRITE: lambda fragment: self._write(fragment, torch.empty(0))}
        frozen = {Order.FROZEN: lambda number: shards.whole(self._parameters[self.schema.frozen[number].name])}
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
                self.write_buffers(flat_B.cpu())


# ---- a description for exports ----
#
# A checkpoint has it, so that ``export`` can write a folder that others open.


def description_of(bare: nn.Module, trained: Iterable[str]) -> dict[str, Any] | None:  # Any: JSON
    """A transformers configuration, adapters of peft by theirs; None for a model that only its script can build."""
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
