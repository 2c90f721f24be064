"""A peer beside a training loop: what the loop and the command line see of it.

Its hook runs inside every ``optimizer.step``. How it begins is in `decentral.peer.startup`, what happens at a boundary
in `decentral.training.outer_loop`; both act on a `Participation`, which only the main process of a peer has.
"""

from __future__ import annotations

import errno
import logging
import math
import threading
from _thread import start_new_thread
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import Self, TypeVar, overload

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Sampler

from decentral.consensus.chain import Head
from decentral.errors import ConfigError, DecentralError, DiskError, NoPeersError
from decentral.node.folder import occupy, read_terms
from decentral.node.node import Node
from decentral.node.upload import PAUSED
from decentral.observe.status import Status
from decentral.peer.boundary import Boundary, wait_for_members
from decentral.peer.network_setup import check_relays
from decentral.peer.participation import (
    POLITE,
    Participation,
    end_as_one,
    end_before_the_run,
    end_of_run,
    save_after_error,
    save_last,
    save_now,
    warn_of_no_checkpoint,
)
from decentral.peer.settings import Settings
from decentral.peer.shown import Announcer, Trackers, shown
from decentral.peer.startup import PeerLimits, Startup
from decentral.peer.status import Shown, StallWatch, status_of
from decentral.preferences.preferences import Preferences
from decentral.signals import StopSignals
from decentral.swarm.invite import load_token
from decentral.swarm.lan import Lan
from decentral.tasks.batches import Indexed, ShardPlace, shard
from decentral.training.clocks import RoundEnded, RunSchedule, cosine
from decentral.training.inner import InnerSteps
from decentral.training.inner_states import Together
from decentral.training.outer_loop import LoopControl
from decentral.training.processes import warn_if_alone
from decentral.training.swarm_side import LoopEnded, SwarmThread, run_blocking

T = TypeVar("T")
OnRound = TypeVar("OnRound", bound=Callable[[RoundEnded], object])


class Peer:
    """The public object of a training loop: a participant of a run, while its ``with`` block lasts."""

    def __init__(self, settings: Settings) -> None:
        check_relays(settings.options["relays"])
        self.settings, self.manifest, self.out = settings, settings.manifest, settings.out
        self._run = self.manifest.digest  # the main process's in the block: on each a script may draw another salt
        self._has_entered = self._has_stepped = False
        self._model = settings.model
        self._announce = Announcer(settings.options["observer"])
        self._stalls = StallWatch(self._announce)
        self._lan = Lan(self._announce) if settings.options["lan"] else None
        self._limits = PeerLimits(settings)
        self._control, self._asked_to_leave = LoopControl(), threading.Event()
        self._signals = StopSignals(self._leave_soon, self._hurry, self._is_held)
        self._steps: InnerSteps | None = None  # inside the block
        self._boundary = Boundary(settings, self._control)
        self._count = self._boundary.count
        self._trackers = Trackers(settings.options["accelerator"])
        self._on_round: list[Callable[[RoundEnded], object]] = []
        self._part: Participation | None = None
        self._parting = ""  # what the status says once all is over
        self._last_status = Status(
            run=self.manifest.run.name,
            run_id=self.manifest.digest.hex(),
            algorithm=self.manifest.outer.method,
            own_loop=True,
            trains_while_paused=True,
        )

    @property
    def done(self) -> bool:
        """True once training is over for this peer. ConfigError before the ``with`` block: nothing would end it."""
        self._check_entered("done")
        return self._boundary.done

    def _check_entered(self, asked: str) -> None:
        if not self._has_entered:
            raise ConfigError(
                f"peer.{asked}: this peer has not entered the run; write `with decentral.join(...) as peer:` and train "
                "inside the block"
            )

    @property
    def _up(self) -> Participation | None:
        """The participation, once there is a swarm side."""
        return self._part if self._part is not None and self._part.is_up else None

    @property
    def _begun(self) -> Participation | None:
        """The participation, once there is an outer loop, too."""
        return self._part if self._part is not None and self._part.has_begun else None

    @property
    def swarm(self) -> SwarmThread[Node]:
        """The swarm side; only the main process has one."""
        assert self._part is not None
        return self._part.swarm

    @property
    def inner_steps(self) -> int:
        """Inner steps of this peer, over all its lives."""
        return self._count.value

    @property
    def was_over(self) -> bool:
        """True where the folder held the run's last commit when this peer began: then nothing is trained."""
        return self._part is not None and self._part.was_over

    @property
    def round(self) -> int:
        """Outer steps that this peer's anchor has behind it; where it has several processes, on all of them those that
        the live model had at the last step boundary.
        """
        if self._up is None or self._model.team.orders is not None:
            return self._count.round
        return self._up.swarm.node.outer_steps

    @property
    def progress(self) -> float:
        """Share of the run's rounds that it has behind it, from 0 to 1; within a round it rises with the inner steps.

        As of the last step boundary, alike on all processes of the peer; 0 before the ``with`` block. A run that
        ``minutes`` end does not come to 1.
        """
        return self._count.progress

    def schedule(self, optimizer: torch.optim.Optimizer, factor: Callable[[float], float] = cosine) -> RunSchedule:
        """A schedule that belongs to the run: every rate is ``factor(peer.progress)`` times what it was at first.

        A newcomer, and who was away, has the rate that the others have. It is stepped by the peer after every inner
        step, ``step()`` in the loop does no harm; it needs no place in ``join(scheduler=...)`` or a checkpoint.

        Args:
            optimizer: one that the loop steps. Its rates now are those that ``factor`` multiplies; after a restart
                those that it had when the schedule was first made.
            factor: of the run's progress, from 0 to 1; half a cosine from 1 to 0.1 when not given.

        Inside the ``with`` block, on every process of the peer; ConfigError before.

        """
        self._check_entered("schedule")
        if not callable(factor):
            raise ConfigError(
                f"peer.schedule: a {type(factor).__name__} cannot be called; pass a function of the run's progress, "
                "such as lambda progress: 1 - progress"
            )
        (bare,) = Together.of([optimizer], "optimizer", "peer.schedule").parts
        return self._boundary.schedules.add(RunSchedule(bare, factor, self._count))

    def on_round(self, call: OnRound) -> OnRound:
        """Call it whenever a round has come into the model, with a `RoundEnded`; returns it, so that it can decorate.

        On the training thread, inside ``optimizer.step``, on every process of the peer, and once for all rounds that
        come at once. What it raises is raised by that ``step``.
        """
        self._on_round.append(call)
        return call

    @property
    def invite(self) -> str:
        """The line that lets others join, by way of this peer or of up to three more; empty while nobody could reach
        this one: before its transport listens, and on processes that do not talk to the swarm.
        """
        return self._up.invite if self._up is not None else ""

    @property
    def anchor_digest(self) -> str:
        """Digest of the newest committed anchor, in hex: equal on all peers of a synchronous run, and on every process
        of the peer as of its last boundary.
        """
        if self._model.team.orders is not None:
            return self._boundary.word.anchor.hex()
        return self._up.swarm.node.replica.digest.hex() if self._up is not None else ""

    def anchor(self) -> list[Tensor]:
        """Return the newest committed anchor, fragment by fragment: flat float32, shared and not to be written to."""
        return list(self._up.swarm.node.replica.anchors) if self._up is not None else self._model.read_alone()

    def agreed(self) -> dict[str, Tensor]:
        """The model that the run has agreed on, as a state dict: a copy on the processor, by the names that parameters
        have in the model given to ``join`` without its wrappers, in their shapes and dtypes.

        It is the newest committed anchor, in gossip this peer's own replica: the trained parameters, and the buffers
        where peers share them (`[model] buffers`). What is frozen is not in it, as it never changes:
        ``load_state_dict(peer.agreed(), strict=False)``.

        On the main process of the peer, inside the ``with`` block or after it; ConfigError elsewhere.
        """
        self._check_entered("agreed")
        if self._part is None:
            raise ConfigError(
                "peer.agreed(): this process does not talk to the swarm; ask on the main one, or use "
                "`with peer.evaluating():` on all of them"
            )
        replica = self._part.swarm.node.replica
        return self._model.by_name(list(replica.anchors), replica.buffers_B if replica.tail.numel else None)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within the block the model that was given to ``join`` holds what the run has agreed on (see ``agreed``), in
        evaluation and without gradients; no optimizer may step there.

        Afterwards, however it ends, parameters, buffers, modes and random generators are as before, bit for bit. It
        takes one copy of what is trained or moved meanwhile. Between two steps, on every process of the peer at once;
        ConfigError before the ``with`` block of ``join``.
        """
        self._check_entered("evaluating")
        anchors, buffers_B = None, None
        if self._part is not None:
            replica = self._part.swarm.node.replica
            anchors, buffers_B = list(replica.anchors), replica.buffers_B
        with self._model.holding(anchors, buffers_B, are_shared=self.manifest.model.buffers != "own"):
            yield

    @property
    def seed(self) -> int:
        """63 bits that follow from the run and this peer's key: for this peer's dropout and data order.

        The same after a restart and on every process of the peer, another one for every peer. Known inside the
        ``with`` block; ConfigError before.
        """
        if not self._boundary.word.seed:
            raise ConfigError("peer.seed is known once the peer has entered the run; ask inside the with block")
        return self._boundary.word.seed

    @overload
    def shard(  # type: ignore[overload-overlap]  # an IterableDataset is a Dataset, and has no indices
        self, dataset: IterableDataset[T], batch_size: int = 1
    ) -> IterableDataset[T]: ...

    @overload
    def shard(self, dataset: Indexed | Dataset[object], batch_size: int = 1) -> Sampler[int]: ...

    @overload
    def shard(self, dataset: Iterable[T], batch_size: int = 1) -> IterableDataset[T]: ...

    def shard(
        self, dataset: Indexed | Dataset[T] | Iterable[T], batch_size: int = 1
    ) -> Sampler[int] | IterableDataset[T]:
        """This peer's part of a data set, disjoint from the other members', for the loop inside the ``with`` block.

        Args:
            dataset: with ``len`` and indices: returns a Sampler for ``DataLoader(dataset, sampler=...)``, one shuffled
                pass after another. To be walked through only: returns an IterableDataset of every n-th item.
            batch_size: items behind one inner step of this peer, all its processes together. It tells a newcomer, or a
                peer that starts again, how far the others are in the pass.

        While the members stay the same, no index is drawn twice in a pass; `decentral.tasks.batches` says what holds
        when they change. A loader that accelerate prepares shares the part among the processes of the peer.
        """
        return shard(dataset, batch_size, self._run, lambda: self.shard_place)

    @property
    def shard_place(self) -> ShardPlace:
        """Where this peer stands among the members, as of the last step boundary: what ``shard`` goes by."""
        return self._boundary.word.place

    def log(self, **metrics: float | Tensor) -> None:
        """Remember training metrics for the observer; the status shows ``loss`` and ``held_out_loss``.

        ConfigError before the ``with`` block, and for what is not one number.
        """
        self._check_entered("log")
        if self._part is not None:
            self._part.reporter.metrics(metrics, self._count.value)
            if "loss" in metrics and self._part.looks is not None:
                self._part.looks.heard(self._part.reporter.counters.loss)
            if self._part.has_begun:
                self._part.loop.schedule.live.loss = self._part.reporter.counters.loss

    def status(self) -> Status:
        """Tell what this peer is doing now; what it did last, once its swarm side has ended."""
        if self._up is not None and self._up.swarm.alive:
            with suppress(RuntimeError, CancelledError):  # the loop ended between the question and the answer
                found = self._up.swarm.call(self._ask_status, self._up)
                if found.inner_steps >= self._last_status.inner_steps:  # two threads ask: an older answer may come late
                    self._last_status = found
        return self._last_status

    async def _ask_status(self, part: Participation) -> Status:
        notices = self._announce.notices.now(part.swarm.node.driver.head.round)
        asked = {"paused": self.paused, "leaving": self._control.leaving, "done": self._boundary.done}
        return status_of(
            Shown(
                manifest=self.manifest,
                part=part,
                stalls=self._stalls,
                notices=notices,
                inner_steps=self.inner_steps,
                **asked,
            )
        )

    def _last_word(self) -> Status:
        """Return the status, and at the end how it ended."""
        status = self.status()
        return replace(status, state=self._parting) if self._parting else status

    def leave(self) -> None:
        """End at the next step boundary: ``done`` becomes true."""
        self._control.leaving = True
        self._asked_to_leave.set()

    def wait_for_company(self) -> None:
        """Wait until the run has a second member; not at all if it ever had one.

        It takes as long as it takes, or ``join_timeout`` of ``join``: NoPeersError. ``leave()`` ends the wait, and so
        does the end of the run: ``done`` is true then. Call it before the first step, on every process of the peer.
        """
        self._wait_for_members(2, lambda head: head.epoch > 0, self.settings.give_up_at)

    def _before_any_step(self) -> None:
        """Runs at the beginning of any optimizer's step; the first waits for a second member, until a round is made."""
        self._control.interrupted = False
        self._signals.step_begins(done=self._boundary.done)
        options, waits = self.settings.options, not (self._has_stepped or self._count.round or self._boundary.done)
        self._has_stepped = True
        if waits and not (options["alone"] or options["require_peers"]):
            self.wait_for_company()
        self._model.joined.before_step()

    def _wait_for_members(self, count: int, enough: Callable[[Head], bool], give_up_at: float | None) -> None:
        wait_for_members(
            self._model, self._part, self._asked_to_leave, count=count, enough=enough, give_up_at=give_up_at
        )
        self._share(())

    def pause(self) -> None:
        """Train on without contributing until ``resume``; the others do not wait for this peer meanwhile."""
        self._control.paused = True
        if self._up is not None:
            self._up.swarm.tell(self._up.swarm.node.resting.begin, PAUSED)

    def resume(self) -> None:
        """Contribute again, from the anchor that the others have reached meanwhile."""
        self._control.paused = False
        if self._up is not None:
            self._up.swarm.tell(self._up.swarm.node.resting.end, PAUSED)

    def finish(self) -> None:
        """End with the next round that is committed: ``done`` becomes true after it; at once while this peer rests."""
        if self.rests:
            self.leave()
        self._control.finishes_after = self.round if self._begun is not None else math.inf

    def limit(self, wanted: Preferences) -> None:
        """Hold to other rates and another day's upload from now on, and compute with other threads."""
        self._limits.change(wanted, self._up)

    def save(self) -> bool:
        """Write a checkpoint, between two steps, on every process of the peer; False while a commit arrives, too."""
        with self._model.team.as_one():
            saved = self._begun is not None and not self._begun.was_over and save_now(self._begun)
        self._share(())
        return saved

    @property
    def in_flight(self) -> bool:
        """True while a contribution of this peer waits for its commit and training goes on."""
        return self._begun is not None and self._begun.loop.schedule.sent_at is not None

    @property
    def paused(self) -> bool:
        """True while contributions are held back."""
        return self._control.paused

    @property
    def rests(self) -> bool:
        """True while no round counts this peer, on its main process: it is paused or rests, or waits for company."""
        part = self._up
        held = part is not None and bool(part.swarm.node.resting.reasons or part.reporter.counters.wanted_members)
        return self._control.paused or held

    @property
    def left(self) -> bool:
        """True on the main process once the peer was asked to leave, or to finish and has; it may be on its way yet."""
        return self._control.leaving

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self._signals)
            self._model.team.on_main(lambda: self._begin(stack))
            self._share(range(len(self._model.schema.fragments)))
            self._run = self._model.team.tell(self._run)
            hooked = self._part is not None and self._part.acts_before_inner_steps
            begins = self._before_inner_step if hooked else None
            parts, looks = self.settings.optimizers.parts, (self._before_any_step, self._model.joined.check_tensors)
            steps = InnerSteps(parts, self._after_inner_step, begins, *looks, after=self._step_is_over)
            self._steps = steps
            stack.enter_context(self._model.undo_guard.watching())
            stack.enter_context(steps.hook(self._model.trained))
            self._has_entered = True
            self._signals.politely()
            if self.settings.options["require_peers"] and not self._boundary.done:
                self._require_peers(self.settings.options["require_peers"])
            self._entered = stack.pop_all()
        return self

    def _begin(self, stack: ExitStack) -> None:
        """Do, on the main process, everything up to the anchor. What is left to be ended goes on the ``stack``."""
        stack.enter_context(occupy(self.out))
        read_terms(self.out, self.manifest.digest)
        token = load_token(self.out, self.settings.admit)
        if self.settings.options["commands"] or not self.settings.options["quiet"]:
            stack.enter_context(shown(self.settings, self._last_word, self))
        if self._model.team.size == 1 and (sentence := warn_if_alone()):
            logging.getLogger("decentral").warning(sentence)
        stack.push(self._note_refusal)  # before the status is written for the last time
        part = self._part = Participation(self.settings, self._announce, token)
        stack.callback(part.close)
        Startup(part, self._control, self._count, self._limits, self._lan, self._stalls).begin()
        self._limits.hold(part)  # somebody may have changed them meanwhile

    def _note_refusal(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Say of what is refused at the start that it has left: it is no process that was killed."""
        if isinstance(error, DecentralError) and not self._has_entered:
            self._parting = "left"

    def _require_peers(self, count: int) -> None:
        me = self._part.identity.peer if self._part is not None else b""
        give_up_at = self.settings.give_up_at
        try:
            self._wait_for_members(count, lambda h: len(h.members) >= count and me in h.members, give_up_at)
        except BaseException as error:
            if self._part is not None:
                last = self.status()
                self._part.close()
                if isinstance(error, NoPeersError):  # as asked for, and no crash: it can be started again
                    self._last_status = replace(last, state="left")
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._steps is not None
        with self._entered:
            self._entered.callback(self._model.averages.stay)
            was_cut = self._steps.stage == "at_boundary" and self._control.was_cut
            save = end_as_one(self._model, kind, "between" if was_cut else self._steps.stage)
            if self._part is not None:
                try:
                    with self._model.team.as_one():
                        self._end(self._part, kind, error, save=save)
                except DiskError as failed:  # of the last checkpoint
                    self._note_stop(failed)
                    raise
                if isinstance(error, NoPeersError | DiskError):
                    self._note_stop(error)
        if kind is None and self._signals.code is not None:
            raise SystemExit(self._signals.code)

    def _note_stop(self, error: DecentralError) -> None:
        """Say that it has left, which can be started again: it waited as long as was asked for, or a disk is full."""
        problem = str(error) if isinstance(error, DiskError) else ""
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.ENOSPC, errno.EDQUOT):
            problem = "the disk is full; free some space"
        self._last_status = replace(self._last_status, state="left", problem=problem)

    def _end(
        self, part: Participation, kind: type[BaseException] | None, error: BaseException | None, *, save: bool
    ) -> None:
        """``kind``: what ended the training loop; None: it came to its own end."""
        whole, over, kept = kind is None, self._boundary.done and not self._control.leaving, False
        polite = kind in POLITE or self._control.leaving
        try:
            if save:
                kept = part.was_over or (save_last(part) if kind in POLITE else save_after_error(part))
            elif self._steps is not None and self._steps.stage == "inside":
                warn_of_no_checkpoint(part, "the training loop ended inside optimizer.step")
            self._model.team.fail(error)
            self._model.team.let_go(interrupted=kind is KeyboardInterrupt)
            if whole and over:
                end_of_run(part, self._asked_to_leave)
            elif whole and not self._control.leaving:
                end_before_the_run(part)
        finally:
            self.status()  # no step is made any more: what it says now of this peer is its last state
            if kept and polite:
                self._parting = "done" if over else "left"
            elif save and polite:  # there is no last checkpoint
                self._last_status = replace(self._last_status, state="leaving")
            part.close(politely=True)

    def _leave_soon(self) -> None:
        """`leave`, inside the handler of a signal, which may have come while this thread holds the event's lock."""
        self._control.leaving = True
        start_new_thread(self._asked_to_leave.set, ())

    def _hurry(self) -> None:
        self._control.interrupted = True

    def _is_held(self) -> bool:
        return self._steps is not None and self._steps.stage != "between" and not self._control.may_be_cut

    def _step_is_over(self) -> None:
        """All that belongs to an optimizer's step is done: what came within it is handled now."""
        self._control.interrupted = False
        self._signals.step_ends()

    def _before_inner_step(self) -> None:
        """Runs at the beginning of an ``optimizer.step``."""
        if self._begun is not None:
            self._begun.loop.schedule.live.before_step()
        self._model.averages.resume()  # the step goes by what trains, and a method may have looked at what is learnt

    def _after_inner_step(self) -> None:
        """Runs inside ``optimizer.step``, of the last one if there are several, on every process of the peer."""
        self._count.stepped()
        self._control.was_cut = False
        if self._model.team.orders is not None:
            self._model.team.orders.steps = self._count.value
        rest, before = self._limits.seconds_to_rest(), self._count.round
        try:
            with self._model.team.as_one():
                changed = self._at_boundary()
            self._share(changed)
            if self._steps is not None:
                self._steps.stage = "between"  # all of it is done: what follows is the user's code
            self._trackers.after_step(self)
            self._tell_round(before)
            self._limits.rest(rest, self._asked_to_leave.wait)
        except BaseException:
            self._model.averages.resume()  # a loop may catch it, and go on
            raise

    def _at_boundary(self) -> set[int]:
        """Act for the main process after an inner step; returns the fragments that were written."""
        if self._part is None:
            return set()
        loop, swarm = self._part.loop, self._part.swarm
        self._part.behind.check()
        loop.schedule.stepped()
        if self._control.finishes_after == math.inf:
            self._control.finishes_after = self.round
        try:
            changed = run_blocking(loop.step_boundary())
        except (LoopEnded, CancelledError):  # the swarm's side ends just now, and its error says more
            raise swarm.reason() from None
        if (last := self._control.finishes_after) is not None and self.round > last and not loop.done:
            self.leave()
        if not (swarm.alive or loop.done or self._boundary.done):
            raise swarm.reason()
        return changed

    def _share(self, changed: Iterable[int]) -> None:
        self._boundary.share(self._part, changed)

    def _tell_round(self, before: int) -> None:
        """Call what ``on_round`` was given, where outer steps came since ``before``."""
        if (ended := self._boundary.round_ended(before)) is not None:
            for call in self._on_round:
                call(ended)
