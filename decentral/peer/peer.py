"""A peer beside a training loop: what the loop and the command line see of it.

Its hook runs inside every ``optimizer.step``. What happens at a boundary is in `boundary`, how it begins in
`beginning`.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import CancelledError
from contextlib import ExitStack, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from decentral.errors import DecentralError
from decentral.observe.beacon import Beacon
from decentral.observe.status import Status, check_free
from decentral.peer.beginning import Beginning
from decentral.peer.daily_upload import DailyUpload
from decentral.peer.entrance import check_relays
from decentral.peer.node import Node
from decentral.peer.resting import PAUSED
from decentral.peer.settings import Settings
from decentral.peer.starting_over import forget_non_finite
from decentral.peer.swarm_thread import SwarmThread
from decentral.swarm.invite import Invite
from decentral.swarm.lan import Lan


class Peer(Beginning):
    """One participant of a run, while its ``with`` block lasts."""

    def __init__(self, settings: Settings) -> None:
        check_relays(settings.relays)
        self.settings, self.manifest, self.out = settings, settings.manifest, settings.out
        self.inner_steps = 0
        self.done = False
        self._model = settings.model
        self._tokens_per_step, self._checkpoint_every = settings.tokens_per_step, settings.checkpoint_every
        self._lan = Lan(self._emit) if settings.lan else None
        self._daily_upload = None
        if settings.daily_upload is not None:
            self._daily_upload = DailyUpload(settings.out, settings.daily_upload)
        self._paused = False
        self._leaving = False
        self._must_save = False
        self._on_nan, self._restarts, self._forgets = settings.on_nan, 0, False
        self._left_at = time.monotonic()
        self._swarm: SwarmThread | None = None
        self._parting = ""  # what the status says once all is over
        self._gossips = self.manifest.exchange.kind == "pair"
        self._last_status = Status(run=self.manifest.run.name, run_id=self.manifest.digest.hex())

    @property
    def round(self) -> int:
        """Outer steps that this peer's anchor has behind it."""
        if self._swarm is None:
            return 0
        node = self._swarm.node
        return node.gossip.step if node.gossip is not None else node.driver.head.outer_step

    @property
    def invite(self) -> str:
        """The line that lets others join, by way of this peer or of up to three more; empty while nobody could reach
        this one: before its transport listens, and on processes that do not talk to the swarm.
        """
        addresses = self._swarm.node.directory.ways_in() if self._swarm is not None else ()
        return str(Invite(self.manifest.digest, addresses, None)) if addresses else ""

    @property
    def anchor_digest(self) -> str:
        """Digest of the newest committed anchor, in hex: equal on all peers of a synchronous run."""
        return self._swarm.node.replica.digest.hex() if self._swarm is not None else ""

    def anchor(self) -> list[Tensor]:
        """The newest committed anchor, fragment by fragment: flat float32, shared and not to be written to."""
        return list(self._swarm.node.replica.anchors) if self._swarm is not None else self._model.read_all()

    def log(self, **metrics: float | Tensor) -> None:
        """Remember a training metric, such as ``loss``, for the status and the observer."""
        if self._swarm is not None:
            self._reporter.metrics({name: _plain(value) for name, value in metrics.items()})

    def status(self) -> Status:
        """What this peer is doing now; what it did last, once its swarm side has ended."""
        if self._swarm is not None and self._swarm.alive:
            with suppress(RuntimeError, CancelledError):  # the loop ended between the question and the answer
                found = self._swarm.call(self._ask_reporter)
                if (
                    found.inner_steps >= self._last_status.inner_steps
                ):  # two threads ask: the older answer may come last
                    self._last_status = found
        return self._last_status

    async def _ask_reporter(self) -> Status:
        return self._reporter.status(self)

    def _last_word(self) -> Status:
        """The status, and at the end how it ended."""
        status = self.status()
        return replace(status, state=self._parting) if self._parting else status

    def _obey(self, request: str) -> None:
        """What somebody asked for in another terminal."""
        {"leave": self.leave, "pause": self.pause, "resume": self.resume}[request]()

    def leave(self) -> None:
        """End at the next step boundary: ``done`` becomes true."""
        self._leaving = True

    def pause(self) -> None:
        """Train on without contributing until ``resume``; the others do not wait for this peer meanwhile."""
        self._paused = True
        if self._swarm is not None:
            self._swarm.begin(self._swarm.node.resting.begin, PAUSED)

    def resume(self) -> None:
        """Contribute again, from the anchor that the others have reached meanwhile."""
        self._paused = False
        if self._swarm is not None:
            self._swarm.begin(self._swarm.node.resting.end, PAUSED)

    @property
    def in_flight(self) -> bool:
        """Whether a contribution of this peer waits for its commit while training goes on."""
        return self._swarm is not None and self._rhythm.sent_at is not None

    @property
    def steps_since_anchor(self) -> int:
        """Inner steps in the live model that no commit accounts for; of the fragment that has the most."""
        return max(progress.steps for progress in self._rhythm.progress) if self._swarm is not None else 0

    @property
    def paused(self) -> bool:
        """Whether contributions are held back."""
        return self._paused

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            if self._model.is_main:
                self.out.mkdir(parents=True, exist_ok=True)
                if self.settings.commands:
                    check_free(self.out, own=os.getpid())
                    stack.enter_context(Beacon(self.out, self._last_word, self._obey))
                self._begin()
            self._model.share(range(len(self._model.schema.fragments)), False, False)
            hook = self.settings.optimizer.register_step_post_hook(self._after_inner_step)
            stack.callback(hook.remove)
            self._entered = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._entered:
            if self._swarm is not None:
                self._end(save=kind is None or kind is KeyboardInterrupt)

    def _end(self, *, save: bool) -> None:
        try:
            if save:
                self._save()
        finally:
            self.status()  # no step is made any more: what it says now of this peer is its last state
            self.swarm.stop(politely=True)
            self._vault.close()
            self._events.close()
            self._parting = "done" if self.done and not self._leaving else "leaving"

    @property
    def swarm(self) -> SwarmThread:
        """The swarm side; only the main process has one."""
        assert self._swarm is not None
        return self._swarm

    def _after_inner_step(self, *_: object) -> None:
        """Runs inside ``optimizer.step`` on every process of the peer."""
        self.inner_steps += 1
        changed: set[int] = set()
        if self._model.is_main:
            self._rhythm.stepped()
            self._reporter.stepped()
            changed = self._step_boundary()
            if not self.swarm.alive and not self.done:
                raise self.swarm.error or DecentralError("the swarm's thread ended; see events.jsonl, then restart")
        ended, forgets = self._model.share(changed, self.done or self._leaving, self._forgets)
        self.done, self._forgets = ended, False
        if forgets:
            forget_non_finite(self.settings.optimizer)

    def _save(self) -> bool:
        """Write a checkpoint if live model and chain are in step; while a commit arrives, leave it to the next."""
        node = self.swarm.node
        head, shared, own, step, age = self.swarm.call(_consistent_state, node)
        if head.anchor is None or (head.hash != self._rhythm.seen and not self._gossips):
            return False
        buffers = self.manifest.model.buffers or "average"  # for the export
        progress = self._rhythm.memory()
        memory = {"inner_steps": self.inner_steps, "gossip_step": step, "age": age, "progress": progress}
        memory["buffers"] = buffers
        self._checkpointer.save(head, {**shared, **own, **self._rhythm.roundings()}, self._model, memory)
        self._must_save = False
        return True

    def _emit(self, event: str, fields: dict[str, object]) -> None:
        self._events(event, **fields)
        if (observer := self.settings.observer) is not None:
            observer({"event": event, **fields})


def _plain(value: float | Tensor) -> float:
    return float(value.detach()) if isinstance(value, Tensor) else float(value)


async def _consistent_state(node: Node) -> tuple[Any, dict[str, Tensor], dict[str, Tensor], int, float]:
    """Head and tensors of one moment: read on the loop, where nothing else can change them meanwhile."""
    step = node.gossip.step if node.gossip is not None else 0
    replica = node.replica
    return node.driver.head, replica.shared_tensors(), replica.own_tensors(), step, node.age
