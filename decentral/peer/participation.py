"""A peer's participation, on the one of its processes that talks to the swarm: its parts, its end and its limits."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from decentral.compressors import parse_compressor
from decentral.compressors.base import relative_error
from decentral.errors import DecentralError, NoPeersError
from decentral.manifest import Manifest
from decentral.node.durable_store import DurableStore
from decentral.node.node import Node
from decentral.node.upload import DailyUpload, check_limit
from decentral.observe.diagnostics import Diagnostics, Look, likely_cause
from decentral.observe.health import over_sentence
from decentral.peer.given import Giving, share_given, thanks
from decentral.peer.network_setup import NetworkSetup
from decentral.peer.saved import LOOK_EVERY, WriteBehind, WriteBudget
from decentral.peer.settings import Settings
from decentral.peer.shown import Announcer
from decentral.pipeline.group import GroupSide
from decentral.preferences.preferences import Duty, Preferences
from decentral.redundancy.recovery import RedundancyService
from decentral.swarm.directory import invite_line
from decentral.swarm.identity import Identity
from decentral.tasks.batches import seed_of
from decentral.tensors.ops import is_finite
from decentral.tensors.threads import ThreadsWanted
from decentral.training.inner import Stage
from decentral.training.live_model import LiveModel
from decentral.training.outer_loop import LoopControl, OuterLoop
from decentral.training.processes import TO_MEET
from decentral.training.reporting import LoggedLooks, Looks, Reporter
from decentral.training.swarm_side import SwarmThread, run_blocking
from decentral.transport.throttle import Caps, ThrottledTransport
from decentral.wire.keys import peer_name

LAST_TRIES = 3  # at the last checkpoint: one more commit may come between looking for it and copying


class Participation:
    """The parts of a peer on its main process, each there from the moment in which `Startup` has made it."""

    network: NetworkSetup  # how it is reached; before the swarm side is up
    swarm: SwarmThread[Node]  # from before it joins
    links: ThrottledTransport  # hold to the caps, from before the swarm side is up
    loop: OuterLoop  # the training side, once it stands at an anchor

    def __init__(self, settings: Settings, announce: Announcer, token: str | None) -> None:
        self.settings, self.announce, self.token = settings, announce, token
        self.was_here = settings.identity_path.exists()  # its key is an older one
        self.identity = Identity.load_or_create(settings.identity_path)
        self.seed = seed_of(settings.manifest.digest, self.identity.peer)
        announce.open(settings.out, peer_name(self.identity.peer))
        self.store = DurableStore(settings.out)
        self.reporter = Reporter(announce, self.identity.peer)
        held_out = settings.options["evaluate"] is not None
        cause = partial(cause_of_being_behind, settings.manifest, held_out=held_out)
        self.diagnostics = Diagnostics(announce, cause)
        # `Startup` has another to evaluate. The built-in loop logs running means, which tell nothing of one round.
        logs = settings.manifest.model.task == "custom"
        self.looks: Looks | LoggedLooks | None = LoggedLooks(self.judge) if logs else None
        self.behind = WriteBehind()  # checkpoints
        self.writes = WriteBudget(settings.max_writes, lambda: self.store.frames.written)
        self.giving = Giving(self.reporter.counters, settings.options["tokens_per_step"], self._sent)
        self.redundancy: RedundancyService | None = None  # where the terms ask for it
        self.sharing: GroupSide | None = None  # where this peer is to be a stage of a replica
        self.was_over = False  # the folder held the run's last commit when this peer began: nothing is trained
        self._is_closed = False

    def judge(self, look: Look) -> None:
        """Judge a look, where a commit leaves the anchor: not beside overlap, nor of one of several fragments."""
        outer = self.settings.manifest.outer
        if outer.overlap == 0 and outer.fragments == 1:
            self.diagnostics.add_look(look, held_out=self.settings.options["evaluate"] is not None)

    @property
    def founds(self) -> bool:
        """True where it begins the run, or goes on with it, by terms of its own: it was not invited."""
        return self.settings.invite is None

    @property
    def is_offline(self) -> bool:
        """True where the run is over for this peer, and it gets in touch with nobody."""
        return self.was_over and not self.settings.options["keep_serving"]

    @property
    def is_up(self) -> bool:
        """True once there is a swarm side, with its node: another thread may ask while it is made."""
        return "swarm" in vars(self) and self.swarm.has_node

    @property
    def has_begun(self) -> bool:
        """True once there is an outer loop."""
        return "loop" in vars(self)

    @property
    def acts_before_inner_steps(self) -> bool:
        """True where the run's method does something before inner steps; then this peer is one process."""
        return self.swarm.node.replica.method.acts_before_steps

    @property
    def invite(self) -> str:
        """The line that lets others join by way of this peer or of up to three more; empty while nobody could."""
        return self._invite(self.token)

    @property
    def invite_to_write(self) -> str:
        """The same without the admission token: for files, logs and whoever observes."""
        return self._invite(None)

    def _sent(self) -> int:
        return self.swarm.transport.traffic.total.sent - self.swarm.node.speed.count.sent if self.is_up else 0

    def _invite(self, token: str | None) -> str:
        reachable = "swarm" in vars(self) and not self.is_offline
        return invite_line(self.swarm.node.directory, self.settings.manifest.digest, token) if reachable else ""

    def log(self, metrics: Mapping[str, float | Tensor], inner_steps: int) -> None:
        """Report values that the loop logged after so many inner steps. ConfigError for what is not one number."""
        self.reporter.metrics(metrics, inner_steps)
        loss = self.reporter.counters.loss
        if "loss" in metrics and self.looks is not None:
            self.looks.heard(loss)
        if self.has_begun:
            self.loop.schedule.live.loss = loss

    def close(self, *, politely: bool = False) -> None:
        """End the swarm's side, saying goodbye when ``politely``, and close the files. A second time does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if "swarm" in vars(self):
            self.swarm.stop(politely=politely)
        with suppress(DecentralError):  # a last checkpoint was waited for before, where there was to be one
            self.behind.wait()
        self.store.close()
        self.announce.close()


def cause_of_being_behind(manifest: Manifest, *, held_out: bool) -> str:
    """Say why together is behind alone by these terms: see `likely_cause`."""
    from decentral.trial.check import outer_gain  # the laboratory, which most peers never need

    lost, waits = relative_error(parse_compressor(manifest.compressor.chain)), manifest.compressor.feedback != "none"
    return likely_cause(outer_gain(manifest), lost, manifest.run.rounds, waits=waits, held_out=held_out)


# ---- the end of a peer ----
#
# What it says, and whom it still serves, once its training loop has come to its own end.

PLAIN = {"plain": True}  # of a log line that is no complaint, and that a display shows without a word before it

logger = logging.getLogger("decentral.peer")


POLITE = (None, KeyboardInterrupt, NoPeersError, SystemExit)  # ends that are none of an error


def end_as_one(model: LiveModel, kind: type[BaseException] | None, stage: Stage) -> bool:
    """Tell whether a last checkpoint can be made: all that the peer holds is of one moment, and its processes are here.

    ``kind``: what ended the training loop; None: it came to its own end. ``stage``: where in an inner step. After an
    error or Ctrl-C one process may be inside what another has left, and waits for it: then the checkpoint before has to
    do. The others give their part from here.
    """
    orders, waits = model.team.orders, kind in (None, NoPeersError)
    if (orders is not None and orders.over) or not _is_whole(kind, stage):
        return False
    if orders is None:
        return True
    if orders.processes.is_main:
        return waits or orders.meet(in_step=model.is_sharded)
    hidden = () if waits or kind is KeyboardInterrupt else (DecentralError,)  # by the error of this process
    with suppress(TimeoutError, *hidden):
        orders.follow(within=None if waits else TO_MEET)
    return True


def _is_whole(kind: type[BaseException] | None, stage: Stage) -> bool:
    """Tell whether all is of one moment. Inside an optimizer's step parameters and moments are not; an error at a
    boundary leaves part of it undone, but for Ctrl-C or a second signal, which each of its parts is made for.
    """
    return stage == "between" or (stage == "at_boundary" and kind in POLITE)


def save_now(part: Participation) -> bool:
    """Write a checkpoint, and return when it is durable; False when this is no moment for one. Raises DiskError."""
    part.behind.wait()
    saved = part.loop.save()
    part.behind.wait()
    return saved


def save_last(part: Participation) -> bool:
    """Bring the live model in step with the chain, and write the last checkpoint. Raises DiskError.

    False, and the user is told, where that cannot be: then the one before stays the newest.
    """
    gossips, why = part.swarm.node.gossip is not None, "a commit was still being applied"
    part.settings.model.borrowed.check()  # else a changed anchor would be kept
    for _ in range(LAST_TRIES):
        if not run_blocking(part.loop.settle()):
            why = "a partner did not say whether it took its half of the last step" if gossips else why
            break
        model = part.settings.model
        if not all(is_finite(model.read(fragment.index)) for fragment in model.schema.fragments):
            why = "the model holds NaN or Inf"
            break
        if save_now(part):
            return True
    warn_of_no_checkpoint(part, why)
    return False


def save_after_error(part: Participation) -> bool:
    """Write the last checkpoint after an error of the training loop, which a failure here must not hide."""
    try:
        if saved := save_last(part):
            kept = "the state of the last inner step is kept in %s, where the same command goes on"
            logger.info(kept, part.settings.called, extra=PLAIN)
        return saved
    except Exception as failed:  # noqa: BLE001 - whatever it is, the error before it says more
        warn_of_no_checkpoint(part, f"{type(failed).__name__}: {failed}")
        return False


def warn_of_no_checkpoint(part: Participation, why: str) -> None:
    """Tell the user that there is no last checkpoint."""
    steps = part.swarm.node.outer_steps
    part.announce("checkpoint_failed", {"round": steps, "outer_step": steps, "why": why})
    logger.warning(
        "no last checkpoint: %s; the next start in %s goes on from the one before", why, part.settings.called
    )


def end_of_run(part: Participation, control: LoopControl) -> None:
    """Say how to have the model of a run that is over, and, where that was wished, stay for peers that come late."""
    out = shlex.quote(str(part.settings.called))
    logger.info("%s", over_sentence(part.settings.called, again=part.was_over and part.founds), extra=PLAIN)
    if part.settings.options["keep_serving"]:
        until = "until Ctrl-C, or decentral leave --out"
        logger.info("its last state can be had here %s %s", until, out, extra=PLAIN)
        with suppress(KeyboardInterrupt):
            while not control.asked_to_leave.wait(LOOK_EVERY) and part.swarm.alive:
                pass


def end_before_the_run(part: Participation) -> None:
    """Warn that the loop ended while the run goes on: often it is of a script that counts its own steps."""
    made = f"{part.swarm.node.outer_steps} of {part.settings.manifest.run.rounds} rounds"
    logger.warning("left after %s; the run goes on without this peer; loop until peer.done", made, extra=PLAIN)


def say_thanks(part: Participation, inner_steps: int) -> None:
    """Say what this peer gave, where it made a step in this life."""
    if part.giving.steps:
        given = part.giving.now()
        share = share_given(given.rounds, part.swarm.node.driver.head.contributions)
        logger.info("%s", thanks(given, inner_steps, share), extra=PLAIN)


# ---- a peer's limits ----
#
# It sends, receives, writes and computes with so much at most, while that changes.


class PeerLimits:
    """The limits of a peer: as ``join`` was told at first. Any thread may change them."""

    def __init__(self, settings: Settings) -> None:
        self.daily_upload = DailyUpload(settings.out, settings.daily_upload)
        self.caps, self.max_writes = settings.caps, settings.max_writes
        self._duty = Duty(time.monotonic, settle_device)
        self._threads = ThreadsWanted()

    def change(self, wanted: Preferences, part: Participation | None) -> None:
        """Hold to other ones. Raises ConfigError for a rate that is too little; nothing is changed then.

        ``part`` is what takes part, once there is a swarm side.
        """
        caps, limit = Caps(up=wanted.max_upload, down=wanted.max_download), check_limit(wanted.daily_upload)
        self.caps, self.daily_upload.limit, self.max_writes = caps, limit, wanted.max_writes
        self._threads.want(wanted.threads)
        self._duty.share = wanted.max_compute or 1.0
        self.hold(part)

    def hold(self, part: Participation | None) -> None:
        """Make the transport and the checkpoints keep to them."""
        if part is not None:
            part.swarm.tell(part.links.cap, self.caps)
            part.writes.hold_to(self.max_writes)

    def seconds_to_rest(self) -> float:
        """Seconds to rest for, once an inner step is over; before anything else is waited for."""
        return self._duty.seconds_to_rest()

    def rest(self, seconds: float, wait: Callable[[float], object]) -> None:
        """``wait`` so long, if at all; the next step begins then."""
        if seconds:
            wait(seconds)
        self._duty.goes_on()


def settle_device() -> None:
    """Wait until an accelerator has done what it was given; a processor has."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
