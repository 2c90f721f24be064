"""A peer beside a training loop: what the loop and the command line see of it.

Its hook runs inside every ``optimizer.step``. What happens at a boundary is in `boundary`, how it begins in
`beginning`.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError
from contextlib import ExitStack, suppress
from dataclasses import astuple, replace
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from decentral.consensus.chain import Head
from decentral.errors import ConfigError, DecentralError, NoPeersError
from decentral.node.daily_upload import DailyUpload
from decentral.node.folder import kept_terms, kept_token
from decentral.node.node import Node
from decentral.node.suspension import PAUSED
from decentral.observe.beacon import Beacon
from decentral.observe.health import alone_sentence
from decentral.observe.notices import Notices
from decentral.observe.status import Status, check_free
from decentral.observe.terminal import PlainDisplay
from decentral.peer.network_setup import check_relays
from decentral.peer.settings import Settings
from decentral.peer.standing import Standing
from decentral.peer.startup import Startup
from decentral.swarm.invite import Invite
from decentral.swarm.lan.discovery import Lan
from decentral.swarm.patience import time_left
from decentral.tasks.shards import ShardPlace, shard
from decentral.training.inner_optimizers import InnerSteps
from decentral.training.starting_over import forget_non_finite
from decentral.training.swarm_thread import SwarmThread

LOOK_EVERY = 0.2  # s between looks at what is waited for
PLAIN = {"plain": True}  # of a log line that is no complaint, and that a display shows without a word before it

logger = logging.getLogger("decentral.peer")


class Peer(Startup):
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
        self._token: str | None = None
        self._paused = False
        self._leaving, self._asked_to_leave = False, threading.Event()
        self._must_save = False
        self._on_nan, self._restarts, self._forgets, self._swap = settings.on_nan, 0, False, None
        self._left_at = time.monotonic()
        self._swarm: SwarmThread | None = None
        self.notices, self._name = Notices(), ""
        self._seed, self._place, self._standing = 0, ShardPlace(), Standing(self.manifest)
        self._parting = ""  # what the status says once all is over
        self.was_over = self._kept_whole = False
        self._gossips = self.manifest.exchange.kind == "pair"
        terms = self.manifest
        self._last_status = Status(
            run=terms.run.name,
            run_id=terms.digest.hex(),
            algorithm=terms.outer.method,
            own_loop=True,
            trains_while_paused=True,
        )

    @property
    def round(self) -> int:
        """Outer steps that this peer's anchor has behind it."""
        return self._swarm.node.outer_steps if self._swarm is not None else 0

    @property
    def invite(self) -> str:
        """The line that lets others join, by way of this peer or of up to three more; empty while nobody could reach
        this one: before its transport listens, and on processes that do not talk to the swarm.
        """
        reachable = self._swarm is not None and not self.is_offline
        addresses = self.swarm.node.directory.ways_in() if reachable else ()
        return str(Invite(self.manifest.digest, addresses, self._token)) if addresses else ""

    @property
    def anchor_digest(self) -> str:
        """Digest of the newest committed anchor, in hex: equal on all peers of a synchronous run."""
        return self._swarm.node.replica.digest.hex() if self._swarm is not None else ""

    def anchor(self) -> list[Tensor]:
        """The newest committed anchor, fragment by fragment: flat float32, shared and not to be written to."""
        return list(self._swarm.node.replica.anchors) if self._swarm is not None else self._model.read_all()

    @property
    def seed(self) -> int:
        """63 bits that follow from the run and this peer's key: for this peer's dropout and data order.

        The same after a restart and on every process of the peer, another one for every peer. Known inside the
        ``with`` block; ConfigError before.
        """
        if not self._seed:
            raise ConfigError("peer.seed is known once the peer has entered the run; ask inside the with block")
        return self._seed

    def shard(self, dataset: Any, batch_size: int = 1) -> Any:  # Any: see tasks.shards.shard
        """This peer's part of a data set, disjoint from the other members', for the loop inside the ``with`` block.

        Args:
            dataset: with ``len`` and indices: returns a Sampler for ``DataLoader(dataset, sampler=...)``, one shuffled
                pass after another. To be walked through only: returns an IterableDataset of every n-th item.
            batch_size: items behind one inner step of this peer, all its processes together. It tells a newcomer, or a
                peer that starts again, how far the others are in the pass.

        While the members stay the same, no index is drawn twice in a pass; `decentral.tasks.shards` says what holds
        when they change. A loader that accelerate prepares shares the part among the processes of the peer.
        """
        return shard(dataset, batch_size, self.manifest.digest, lambda: self._place)

    def log(self, **metrics: float | Tensor) -> None:
        """Remember training metrics for the observer; the status shows ``loss`` and ``held_out_loss``."""
        if self._swarm is not None:
            self._reporter.metrics({name: _plain(value) for name, value in metrics.items()})

    def status(self) -> Status:
        """What this peer is doing now; what it did last, once its swarm side has ended."""
        if self._swarm is not None and self._swarm.alive:
            with suppress(RuntimeError, CancelledError):  # the loop ended between the question and the answer
                found = self._swarm.call(self._ask_reporter)
                if found.inner_steps >= self._last_status.inner_steps:  # two threads ask: an older answer may come late
                    self._last_status = found
        return self._last_status

    async def _ask_reporter(self) -> Status:
        return self._reporter.status(self)

    def _last_word(self) -> Status:
        """The status, and at the end how it ended."""
        status = self.status()
        return replace(status, state=self._parting) if self._parting else status

    def _beacon(self) -> Beacon:
        """Tells the folder and the screen how this peer is, as far as either is wanted."""
        given, display = self.settings, None
        if not given.quiet:
            by_command = f"decentral leave --out {self.out}, or " if given.commands else ""
            display = PlainDisplay(sys.stderr, stop=f"{by_command}peer.leave()", prefix="decentral: ")
        return Beacon(self.out if given.commands else None, self._last_word, self._obey, display=display)

    def _obey(self, request: str) -> None:
        """What somebody asked for in another terminal."""
        {"leave": self.leave, "pause": self.pause, "resume": self.resume}[request]()

    def leave(self) -> None:
        """End at the next step boundary: ``done`` becomes true."""
        self._leaving = True
        self._asked_to_leave.set()

    def wait_for_company(self) -> None:
        """Wait, for as long as it takes, until the run has a second member; not at all if it ever had one.

        ``leave()`` ends the wait, and so does the end of the run: ``done`` is true then. Call it before the first step,
        on every process of the peer.
        """
        self._wait_for_members(2, lambda head: head.epoch > 0, None)

    def _wait_for_members(self, count: int, enough: Callable[[Head], bool], give_up_at: float | None) -> None:
        while not self._model.share((), self._may_begin(count, enough), ())[0]:
            if self._model.is_main and time_left(give_up_at) == 0.0:
                here = len(self.swarm.node.driver.head.members)
                raise NoPeersError(
                    f"{here} of {count} required peers within the time given to join_timeout; start the others, then "
                    f"this one again in {self.out}, where it goes on as the same peer, or require fewer of them"
                )
            self._asked_to_leave.wait(LOOK_EVERY)
        self.done = self._share((), self.done or self._leaving)

    def _may_begin(self, count: int, enough: Callable[[Head], bool]) -> bool:
        """On the main process: whether the wait is over, for whatever reason."""
        if not self._model.is_main:
            return False
        self._end_if_over()
        begins = enough(self.swarm.node.driver.head) or self.done or self._leaving or not self.swarm.alive
        self._reporter.wanted_members = 0 if begins else count
        self.swarm.node.waits = not begins
        return begins

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
                kept_terms(self.out, self.manifest.digest)
                self._token = kept_token(self.out, self.settings.admit)
                self.out.mkdir(parents=True, exist_ok=True)
                if self.settings.commands:
                    check_free(self.out, own=os.getpid())
                if self.settings.commands or not self.settings.quiet:
                    stack.enter_context(self._beacon())
                self._begin()
            self.done = self._share(range(len(self._model.schema.fragments)), self.done)
            steps = InnerSteps(self.settings.optimizers.parts, self._after_inner_step)
            stack.enter_context(steps.hooked(self._model.trained))
            if self.settings.require_peers and not self.done:
                self._require_peers()
            self._entered = stack.pop_all()
        return self

    def _require_peers(self) -> None:
        count, me = self.settings.require_peers, self.swarm.node.driver.me if self._swarm is not None else b""
        try:
            self._wait_for_members(
                count, lambda h: len(h.members) >= count and me in h.members, self.settings.give_up_at
            )
        except BaseException as error:
            if self._swarm is not None:
                last = self.status()
                self._swarm.stop(politely=False)
                if isinstance(error, NoPeersError):  # as asked for, and no crash: it can be started again
                    self._last_status = replace(last, state="left")
                self._vault.close()
                self._events.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._entered:
            if self._swarm is not None:
                self._end(save=kind is None or kind is KeyboardInterrupt, whole=kind is None)

    def _end(self, *, save: bool, whole: bool) -> None:
        """``whole``: the loop came to its own end."""
        over = self.done and not self._leaving
        try:
            if save and not self.was_over:
                self._end_swap_if_any()
                self._save()
            if whole:
                self._say_how_it_ended(over)
        finally:
            self.status()  # no step is made any more: what it says now of this peer is its last state
            self.swarm.stop(politely=True)
            self._vault.close()
            self._events.close()
            if save:  # else an error ended it, and its last state is the one it had then
                self._parting = "done" if over else "left"

    def _say_how_it_ended(self, over: bool) -> None:
        if over:
            logger.info("This run is over: decentral export %s --to model/", self.out, extra=PLAIN)
            if self.settings.keep_serving:
                self._serve_those_who_come_late()
        elif not self._leaving:
            made = f"{self.round} of {self.manifest.run.rounds} rounds"
            logger.warning("left after %s; the run goes on without this peer; loop until peer.done", made, extra=PLAIN)

    def _serve_those_who_come_late(self) -> None:
        """Until somebody asks this peer to leave, or Ctrl-C."""
        until = "until Ctrl-C, or decentral leave --out"
        logger.info("its last state can be had here %s %s", until, self.out, extra=PLAIN)
        with suppress(KeyboardInterrupt):
            while not self._asked_to_leave.wait(LOOK_EVERY) and self.swarm.alive:
                pass

    @property
    def swarm(self) -> SwarmThread:
        """The swarm side; only the main process has one."""
        assert self._swarm is not None
        return self._swarm

    def _after_inner_step(self) -> None:
        """Runs inside ``optimizer.step``, of the last one if there are several, on every process of the peer."""
        self.inner_steps += 1
        changed: set[int] = set()
        if self._model.is_main:
            self._rhythm.stepped()
            self._reporter.stepped()
            changed = self._step_boundary()
            if not self.swarm.alive and not self.done:
                raise self.swarm.error or DecentralError("the swarm's thread ended; see events.jsonl, then restart")
        self.done = self._share(changed, self.done or self._leaving)

    def _share(self, changed: Iterable[int], ended: bool) -> bool:
        """Bring the peer's processes in step, and note its place among the members for all of them alike."""
        if self._model.is_main:
            self._place = self._standing.place(self.swarm.node)
        told = (int(self._forgets), self._seed, *astuple(self._place))
        done, (forgets, self._seed, *place) = self._model.share(changed, ended, told)
        self._place, self._forgets = ShardPlace(*place), False
        if forgets:
            for optimizer in self.settings.optimizers.parts:
                forget_non_finite(optimizer)
        return done

    def _save(self) -> bool:
        """Write a checkpoint if live model and chain are in step; while a commit arrives, leave it to the next."""
        node = self.swarm.node
        if node.gossip is not None and node.gossip.is_swapping:
            return False  # the partner may have stepped already
        head, shared, own, step, age, over = self.swarm.call(_consistent_state, node)
        if head.anchor is None or (head.hash != self._rhythm.seen and not self._gossips):
            return False
        buffers = self.manifest.model.buffers or "average"  # for the export
        progress = self._rhythm.memory()
        memory = {"inner_steps": self.inner_steps, "gossip_step": step, "age": age, "progress": progress}
        memory |= {"buffers": buffers, "over": over}
        self._checkpointer.save(head, {**shared, **own, **self._rhythm.roundings()}, self._model, memory)
        self._must_save = False
        return True

    def _emit(self, event: str, fields: dict[str, object]) -> None:
        self._events(event, **fields)
        if (sentence := self.notices.hear(event, fields, self._name)) is not None:
            logging.getLogger("decentral").warning(sentence)
        if event == "alone" and isinstance(names := fields["peers"], list):
            logger.warning("%s", alone_sentence(names, left=bool(fields["left"])))
        if (observer := self.settings.observer) is not None:
            observer({"event": event, **fields})


def _plain(value: float | Tensor) -> float:
    return float(value.detach()) if isinstance(value, Tensor) else float(value)


async def _consistent_state(node: Node) -> tuple[Head, dict[str, Tensor], dict[str, Tensor], int, float, bool]:
    """Head and tensors of one moment, and whether they are the run's last: read on the loop, where nothing else can
    change them meanwhile.
    """
    step = node.gossip.step if node.gossip is not None else 0
    replica = node.replica
    head = node.driver.head
    over = head.final and head.anchor == replica.digest
    return head, replica.shared_tensors(), replica.own_tensors(), step, node.age, over
