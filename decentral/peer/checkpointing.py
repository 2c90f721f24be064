"""What one peer writes down so that a restart goes on as if nothing had happened.

Anchor, outer state, shared buffers and debt (the replica); live model with its buffers, inner optimizer, scheduler and
random generators (the training side); inner steps, gossip step and age of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from decentral.consensus.chain import Head
from decentral.errors import ManifestMismatch
from decentral.node.durable_store import DurableStore, Resumed
from decentral.node.node import Node
from decentral.parameters import Schema
from decentral.peer.participation import StepCount
from decentral.state.optimizer_state import flatten, unflatten
from decentral.swarm.hello import model_difference
from decentral.training.live_model import LiveModel
from decentral.training.processes.inner_states import InnerStates
from decentral.training.swarm.thread import SwarmThread
from decentral.training.sync_schedule import SyncSchedule


class Checkpointer:
    """Writes and restores the training side together with the replica."""

    def __init__(self, store: DurableStore, states: InnerStates) -> None:
        self._store, self._states = store, states

    def save(self, head: Head, replica: Mapping[str, Tensor], model: LiveModel, memory: Mapping[str, Any]) -> None:
        """Write one checkpoint. Raises DiskError; earlier checkpoints are as before."""
        live = {live_name(f): model.read(f) for f in range(len(model.schema.fragments))} | model.kept_buffers()
        # After the model was read: an optimizer that learns an average is then at it, and its state is of it.
        tensors, document = flatten(self._states.kept(), "training")
        meta = {**memory, "training": document, "schema": model.schema.digest.hex()}
        meta |= {"parameters": model.schema.to_json(), "model": model.description()}
        self._store.keep_frozen(model.schema.frozen, model.frozen, model.whole)
        self._store.save(head, {**replica, **live, **tensors}, meta)

    def restore(self, found: Resumed, model: LiveModel) -> dict[str, Any]:
        """Put the training side back; returns ``memory`` as it was saved. Raises ManifestMismatch for another model."""
        if found.meta.get("schema") != model.schema.digest.hex():
            kept = Schema.from_json(str(found.meta.get("parameters")))
            raise ManifestMismatch(
                f"the checkpoint is of another model: {model_difference(model.schema, kept)}; "
                "build the same one, or choose another run directory"
            )
        for fragment in range(len(model.schema.fragments)):
            model.write(fragment, found.tensors[live_name(fragment)])
        model.restore_buffers(found.tensors)
        self._states.restore(unflatten(found.meta["training"], found.tensors))
        return dict(found.meta)


@dataclass(frozen=True, slots=True)
class Saver:
    """Writes a checkpoint where live model and chain are in step."""

    swarm: SwarmThread[Node]
    checkpointer: Checkpointer
    model: LiveModel
    count: StepCount
    buffers: str  # what the run makes of them, for the export

    def save(self, schedule: SyncSchedule) -> bool:
        """False while a commit arrives: it is left to the next boundary. Raises DiskError."""
        node = self.swarm.node
        if node.gossip is not None and node.gossip.is_swapping:
            return False  # the partner may have stepped already
        head, tensors, memory = self.swarm.call(_consistent_state, node)
        if head.anchor is None or (head.hash != schedule.seen and node.gossip is None):
            return False
        memory |= {"inner_steps": self.count.value, "progress": schedule.memory(), "buffers": self.buffers}
        self.checkpointer.save(head, {**tensors, **schedule.tensors()}, self.model, memory)
        return True


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
