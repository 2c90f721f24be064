"""A peer beside a training loop: what the loop and the command line see of it.

How it begins is in `decentral.peer.startup`, and its work inside every ``optimizer.step`` in `decentral.peer.boundary`;
both act on a `Participation`, which only the main process of a peer has, and which ends with the ``with`` block.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Self, TypeVar, overload

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Sampler

from decentral.errors import ConfigError, DecentralError, DiskError, NoPeersError
from decentral.node.folder import occupy, read_terms
from decentral.node.node import Node
from decentral.node.upload import PAUSED
from decentral.observe.status import Status
from decentral.peer.boundary import Boundary, StepHooks
from decentral.peer.network_setup import check_relays
from decentral.peer.participation import (
    POLITE,
    Participation,
    PeerLimits,
    end_as_one,
    end_before_the_run,
    end_of_run,
    save_after_error,
    save_last,
    save_now,
    say_thanks,
    warn_of_no_checkpoint,
)
from decentral.peer.settings import Settings
from decentral.peer.sharing import SharedReplica
from decentral.peer.shown import Announcer, shown
from decentral.peer.startup import Startup
from decentral.peer.status import NewestStatus
from decentral.pipeline.stage import Stage, segments_of
from decentral.preferences.preferences import Preferences
from decentral.swarm.invite import load_token
from decentral.swarm.lan import Lan
from decentral.tasks.batches import Indexed, ShardPlace, shard
from decentral.training.clocks import RoundEnded, RunSchedule, cosine
from decentral.training.inner_states import Together
from decentral.training.outer_loop import LoopControl
from decentral.training.processes import warn_if_alone
from decentral.training.swarm_side import SwarmThread, run_blocking

T = TypeVar("T")
OnRound = TypeVar("OnRound", bound=Callable[[RoundEnded], object])


class Peer:
    """The public object of a training loop: a participant of a run, while its ``with`` block lasts."""

    def __init__(self, settings: Settings) -> None:
        check_relays(settings.options["relays"])
        self.settings, self.manifest, self.out = settings, settings.manifest, settings.out
        self._run = self.manifest.digest  # the main process's in the block: on each a script may draw another salt
        self._has_entered = False
        self._model = settings.model
        self._announce = Announcer(settings.options["observer"])
        self._lan = Lan(self._announce) if settings.options["lan"] else None
        self._limits = PeerLimits(settings)
        self._control = LoopControl()
        self._boundary = Boundary(settings, self._control)
        self._hooks = StepHooks(self, settings, self._boundary, self._control, self._limits)
        self._status = NewestStatus(settings, self._announce, self._control, self._boundary)
        self._shared = SharedReplica(settings, self._boundary, self._control) if settings.options["share"] else None
        self._part: Participation | None = None  # on the main process, inside the block

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
        return self._boundary.count.value

    @property
    def was_over(self) -> bool:
        """True where the folder held the run's last commit when this peer began: then nothing is trained."""
        return self._part is not None and self._part.was_over

    @property
    def round(self) -> int:
        """Outer steps that this peer's anchor has behind it; where it has several processes, on all of them those that
        the live model had at the last step boundary.
        """
        return self._boundary.outer_steps(self._up)

    @property
    def progress(self) -> float:
        """Share of the run's rounds that it has behind it, from 0 to 1; within a round it rises with the inner steps.

        As of the last step boundary, alike on all processes of the peer; 0 before the ``with`` block. A run that
        ``minutes`` end does not come to 1.
        """
        return self._boundary.count.progress

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
        return self._boundary.schedules.add(RunSchedule(bare, factor, self._boundary.count))

    def on_round(self, call: OnRound) -> OnRound:
        """Call it whenever a round has come into the model, with a `RoundEnded`; returns it, so that it can decorate.

        On the training thread, inside ``optimizer.step``, on every process of the peer, and once for all rounds that
        come at once. What it raises is raised by that ``step``.
        """
        self._hooks.on_round.append(call)
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
        if self._up is not None:
            return list(self._up.swarm.node.replica.anchors)
        if self._model.is_sharded:
            raise ConfigError("peer.anchor(): of a sharded model the main process has it, inside the with block")
        held = self._model.read_all()
        self._model.averages.resume()
        return held

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

    def gradients(
        self, inputs: Tensor, targets: Tensor, loss: Callable[[Tensor, Tensor], Tensor], clip: float | None = None
    ) -> float | None:
        """Make the gradients of one inner step, forward and back, in place of the loop's own ``backward``; step then.

        Where this peer shares a replica (``join(share=True)``) all machines of it make them together, each those of
        its own stage; else this one makes all. Returns the loss. None: no gradients could be made, as a machine of the
        replica has gone, or the run is over: make no step then, and look at ``done``.

            loss = peer.gradients(inputs, targets, torch.nn.functional.cross_entropy, clip=1.0)
            if loss is not None:
                optimizer.step()
            optimizer.zero_grad()

        Args:
            inputs: the batch, samples first; of a replica of several machines that of its first stage is trained on,
                and all give one of the same shape.
            targets: what the loss is measured by, samples first.
            loss: of outputs and targets, a mean over samples.
            clip: largest norm of all gradients together; None: as they are.

        Raises ConfigError for a model that does not say in which segments it runs, or a batch of another shape.
        """
        self._check_entered("gradients")
        if self._shared is None or self._part is None:
            segments = segments_of(self._model.bare, self._model.schema.fragments)
            whole = Stage([one for fragment in segments for one in fragment], 0, 1)
            return run_blocking(whole.step(None, [inputs], [targets], loss, clip))
        return self._shared.gradients(self._part, inputs, targets, loss, clip)

    def log(self, **metrics: float | Tensor) -> None:
        """Remember training metrics for the observer; the status shows ``loss`` and ``held_out_loss``.

        ConfigError before the ``with`` block, and for what is not one number.
        """
        self._check_entered("log")
        if self._part is not None:
            self._part.log(metrics, self.inner_steps)

    def status(self) -> Status:
        """Tell what this peer is doing now; what it did last, once its swarm side has ended."""
        return self._status.ask(self._up)

    def leave(self) -> None:
        """End at the next step boundary: ``done`` becomes true."""
        self._control.leave()

    def wait_for_company(self) -> None:
        """Wait until the run has a second member; not at all if it ever had one.

        It takes as long as it takes, or ``join_timeout`` of ``join``: NoPeersError. ``leave()`` ends the wait, and so
        does the end of the run: ``done`` is true then. Call it before the first step, on every process of the peer.
        """
        self._boundary.wait_for_company(self._part)

    def pause(self) -> None:
        """Train on without contributing until ``resume``; the others do not wait for this peer meanwhile."""
        self._control.paused = True
        if self._part is not None:
            self._part.giving.pauses()
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
        self._boundary.share(self._part, ())
        return saved

    @property
    def in_flight(self) -> bool:
        """True while a contribution of this peer waits for its commit and training goes on."""
        return self._begun is not None and self._begun.loop.schedule.timing.sent_at is not None

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
            stack.enter_context(self._hooks.signals)
            self._model.team.on_main(lambda: self._begin(stack))
            self._boundary.share(self._part, range(len(self._model.schema.fragments)))
            self._run = self._model.team.tell(self._run)
            stack.enter_context(self._model.undo_guard.watching())
            stack.enter_context(self._hooks.hook(self._part))
            self._has_entered = True
            self._hooks.signals.politely()
            if (count := self.settings.options["require_peers"]) and not self._boundary.done:
                self._require_peers(count)
            self._entered = stack.pop_all()
        return self

    def _begin(self, stack: ExitStack) -> None:
        """Do, on the main process, everything up to the anchor. What is left to be ended goes on the ``stack``."""
        stack.enter_context(occupy(self.out))
        read_terms(self.out, self.manifest.digest)
        token = load_token(self.out, self.settings.admit)
        if self.settings.options["commands"] or not self.settings.options["quiet"]:
            stack.enter_context(shown(self.settings, lambda: self._status.ask_for_people(self._up), self))
        if self._model.team.size == 1 and (sentence := warn_if_alone()):
            logging.getLogger("decentral").warning(sentence)
        stack.push(self._note_refusal)  # before the status is written for the last time
        part = self._part = Participation(self.settings, self._announce, token)
        stack.callback(part.close)
        stack.callback(self._model.train_all)
        Startup(part, self._control, self._boundary.count, self._limits, self._lan, self._status.stalls).begin()
        self._limits.hold(part)  # somebody may have changed them meanwhile

    def _note_refusal(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Say of what is refused at the start that it has left: it is no process that was killed."""
        if isinstance(error, DecentralError) and not self._has_entered:
            self._status.parting = "left"

    def _require_peers(self, count: int) -> None:
        me = self._part.identity.peer if self._part is not None else b""
        try:
            self._boundary.wait_for_members(self._part, count, lambda h: len(h.members) >= count and me in h.members)
        except BaseException as error:
            if self._part is not None:
                self.status()
                self._part.close()
                if isinstance(error, NoPeersError):  # as asked for, and no crash: it can be started again
                    self._status.ends_as("left")
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._entered:
            self._entered.callback(self._model.averages.stay)
            if self._shared is not None:
                self._shared.close()
            was_cut = self._hooks.stage == "at_boundary" and self._control.was_cut
            save = end_as_one(self._model, kind, "between" if was_cut else self._hooks.stage)
            if self._part is not None:
                try:
                    with self._model.team.as_one():
                        self._end(self._part, kind, error, save=save)
                except DiskError as failed:  # of the last checkpoint
                    self._status.ends_by(failed)
                    raise
                if isinstance(error, NoPeersError | DiskError):
                    self._status.ends_by(error)
        if kind is None and self._hooks.signals.code is not None:
            raise SystemExit(self._hooks.signals.code)

    def _end(
        self, part: Participation, kind: type[BaseException] | None, error: BaseException | None, *, save: bool
    ) -> None:
        """``kind``: what ended the training loop; None: it came to its own end."""
        whole, over, kept = kind is None, self._boundary.done and not self._control.leaving, False
        polite = kind in POLITE or self._control.leaving
        try:
            if save:
                kept = part.was_over or (save_last(part) if kind in POLITE else save_after_error(part))
            elif self._hooks.stage == "inside":
                warn_of_no_checkpoint(part, "the training loop ended inside optimizer.step")
            self._model.team.fail(error)
            self._model.team.let_go(interrupted=kind is KeyboardInterrupt)
            if whole and over:
                end_of_run(part, self._control)
            elif whole and not self._control.leaving:
                end_before_the_run(part)
        finally:
            self.status()  # no step is made any more: what it says now of this peer is its last state
            if kept and polite:
                self._status.parting = "done" if over else "left"
            elif save and polite:  # there is no last checkpoint
                self._status.ends_as("leaving")
            if polite:
                say_thanks(part, self.inner_steps)
            part.close(politely=True)
