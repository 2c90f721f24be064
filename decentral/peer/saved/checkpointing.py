"""What one peer writes down so that a restart goes on as if nothing had happened.

Anchor, outer state, shared buffers and debt (the replica); live model with its buffers, inner optimizer, scheduler and
random generators (the training side); inner steps, gossip step and age of the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from decentral.consensus.chain import Head
from decentral.errors import ConfigError, ManifestMismatch
from decentral.node.durable_store import DurableStore, Resumed
from decentral.node.node import Node
from decentral.parameters import Schema
from decentral.peer.participation import StepCount
from decentral.peer.saved.write_behind import WriteBehind
from decentral.state.checkpoint import flatten, unflatten
from decentral.swarm.hello import model_difference
from decentral.training.inner_states import InnerStates
from decentral.training.live_model import LiveModel
from decentral.training.resuming import memory_of, tensors_of
from decentral.training.schedule import SyncSchedule
from decentral.training.swarm_side import SwarmThread


@dataclass(frozen=True, slots=True)
class Taken:
    """A checkpoint in memory: nothing changes it any more, so it is written while training goes on."""

    head: Head
    tensors: Mapping[str, Tensor]
    meta: Mapping[str, Any]  # Any: JSON
    swaps: int  # gossip steps that were begun before

    @property
    def nbytes(self) -> int:
        """Of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


class Checkpointer:
    """Takes, writes and restores the training side together with the replica."""

    def __init__(self, store: DurableStore, states: InnerStates) -> None:
        self._store, self._states = store, states

    @property
    def swaps(self) -> int:
        """Gossip steps that were begun so far."""
        return self._store.swaps

    def take(
        self, head: Head, replica: Mapping[str, Tensor], model: LiveModel, memory: Mapping[str, Any], swaps: int
    ) -> Taken:
        """Copy what training changes; the replica's tensors are replaced and never written to. ``swaps``: as before
        ``replica`` was looked at.
        """
        live = {live_name(f): one_N for f, one_N in enumerate(model.read_all())} | model.kept_buffers()
        # After the model was read: an optimizer that learns an average is then at it, and its state is of it.
        tensors, document = flatten(self._states.kept(), "training")
        meta = {**memory, "training": document, "schema": model.schema.digest.hex()}
        meta |= {"parameters": model.schema.to_json(), "model": model.description()}
        self._store.keep_frozen(model.schema.frozen, model.frozen, model.whole)
        return Taken(head, {**replica, **live, **tensors}, meta, swaps)

    def write(self, taken: Taken) -> None:
        """Make it durable, on any thread. Raises DiskError; earlier checkpoints are as before."""
        self._store.save(taken.head, taken.tensors, taken.meta, swaps=taken.swaps)

    def restore(self, found: Resumed, model: LiveModel) -> dict[str, Any]:
        """Put the training side back; returns ``memory`` as it was saved. Raises ManifestMismatch for another model."""
        _check_model(found.meta, model)
        for fragment in range(len(model.schema.fragments)):
            model.write(fragment, found.tensors[live_name(fragment)])
        model.restore_buffers(found.tensors)
        self._states.restore(unflatten(found.meta["training"], found.tensors))
        return dict(found.meta)

    def restore_own(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], model: LiveModel) -> None:
        """Put back a peer's own. Raises ConfigError for another model or optimizer: all is as before then."""
        _check_model(meta, model)
        before = self._states.kept()
        try:
            self._states.restore(unflatten(meta["training"], tensors))
            if meta["buffers"] == "own":
                model.restore_buffers(tensors)
        except (ConfigError, ValueError, KeyError, TypeError, RuntimeError) as error:  # as torch says it, and we
            self._states.restore(before)
            raise ConfigError(f"it is of another inner optimizer or model ({error})") from error


@dataclass(frozen=True, slots=True)
class Saver:
    """Takes a checkpoint where live model and chain are in step, and has it written while training goes on."""

    swarm: SwarmThread[Node]
    checkpointer: Checkpointer
    model: LiveModel
    count: StepCount
    buffers: str  # what the run makes of them, for the export
    behind: WriteBehind
    told: Callable[[float], None]  # s that taking one held the training thread
    announce: Callable[[str, dict[str, object]], None]
    after: Callable[[Taken], None] = lambda taken: None  # once it is durable, on the thread that wrote it
    clock: Callable[[], float] = time.monotonic

    def save(self, schedule: SyncSchedule) -> bool:
        """False while a commit arrives, or the last one is being written: it is left to the next boundary. Raises what
        ended the last one (DiskError).
        """
        if self.behind.busy:
            return False
        began = self.clock()
        taken = self._take(schedule)
        if taken is None:
            return False
        held = self.clock() - began
        self.told(held)
        self.behind.begin(lambda: self._write(taken, held))
        return True

    def _take(self, schedule: SyncSchedule) -> Taken | None:
        node, swaps = self.swarm.node, self.checkpointer.swaps
        if node.gossip is not None and node.gossip.is_swapping:
            return None  # the partner may have stepped already
        head, tensors, memory = self.swarm.call(_consistent_state, node)
        if head.anchor is None or (head.hash != schedule.seen and node.gossip is None):
            return None
        memory |= {"inner_steps": self.count.value, "progress": memory_of(schedule), "buffers": self.buffers}
        return self.checkpointer.take(head, {**tensors, **tensors_of(schedule)}, self.model, memory, swaps)

    def _write(self, taken: Taken, held: float) -> None:
        began = self.clock()
        self.checkpointer.write(taken)
        nbytes, seconds = taken.nbytes, round(self.clock() - began, 3)
        at, held = taken.head.round, round(held, 4)
        self.announce("checkpoint", {"round": at, "bytes": nbytes, "held": held, "seconds": seconds})
        self.after(taken)


def _check_model(meta: Mapping[str, Any], model: LiveModel) -> None:
    if meta.get("schema") != model.schema.digest.hex():
        kept = Schema.from_json(str(meta.get("parameters")))
        raise ManifestMismatch(
            f"the checkpoint is of another model: {model_difference(model.schema, kept)}; "
            "build the same one, or choose another run directory"
        )


async def _consistent_state(node: Node) -> tuple[Head, dict[str, Tensor], dict[str, Any]]:
    """Head, tensors and memory of one moment: read on the loop, where nothing else can change them meanwhile."""
    replica, head = node.replica, node.driver.head
    step = node.gossip.step if node.gossip is not None else 0
    is_the_last = head.final and head.anchor == replica.digest
    memory = {"gossip_step": step, "age": node.age, "over": is_the_last, "ways": node.ways_to_others()}
    return head, {**replica.shared_tensors(), **replica.own_tensors()}, memory


def live_name(fragment: int) -> str:
    """Name of a fragment of the live model in a checkpoint."""
    return f"live/{fragment}"
