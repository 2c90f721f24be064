"""A peer's participation, on the one of its processes that talks to the swarm: the parts that it consists of, how it
gathers with others, where it stands among them, how it ends.
"""

from __future__ import annotations

import logging
import shlex
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from decentral.compressors import parse_compressor
from decentral.compressors.base import relative_error
from decentral.consensus.chain import Head
from decentral.errors import DecentralError, NoPeersError
from decentral.manifest import Manifest
from decentral.node.durable_store import DurableStore
from decentral.node.node import Node
from decentral.observe.diagnostics import Look, likely_cause
from decentral.peer.network_setup import NetworkSetup
from decentral.peer.settings import Settings
from decentral.peer.shown import Announcer
from decentral.quantities import time_left
from decentral.swarm.identity import Identity
from decentral.swarm.invite import Invite
from decentral.tasks.batches import ShardPlace
from decentral.training.inner import Stage
from decentral.training.live_model import LiveModel
from decentral.training.outer_loop import OuterLoop
from decentral.training.processes import TO_MEET
from decentral.training.reporting import Diagnosed, LoggedLooks, Looks, Reporter
from decentral.training.swarm_side import SwarmThread, run_blocking
from decentral.transport.throttle import ThrottledTransport
from decentral.wire.keys import PeerId, peer_name

LOOK_EVERY = 0.2  # s: Ctrl-C must get through to who waits, on every platform
LAST_TRIES = 3  # at the last checkpoint: one more commit may come between looking for it and copying


class Participation:
    """The parts, each there from the moment in which `Startup` has made it."""

    def __init__(self, settings: Settings, announce: Announcer, token: str | None) -> None:
        self.settings, self.announce, self.token = settings, announce, token
        self.was_here = settings.identity_path.exists()  # its key is an older one
        self.identity = Identity.load_or_create(settings.identity_path)
        announce.open(settings.out, peer_name(self.identity.peer))
        self.store = DurableStore(settings.out)
        self.reporter = Reporter(announce, self.identity.peer)
        held_out = settings.options["evaluate"] is not None
        cause = partial(cause_of_being_behind, settings.manifest, held_out=held_out)
        self.diagnosed = Diagnosed(announce, cause)
        # `Startup` has another to evaluate. The built-in loop logs running means, which tell nothing of one round.
        logs = settings.manifest.model.task == "custom"
        self.looks: Looks | LoggedLooks | None = LoggedLooks(self.looked) if logs else None
        self.behind = WriteBehind()  # checkpoints
        self.was_over = False  # the folder held the run's last commit when this peer began: nothing is trained
        self._network: NetworkSetup | None = None
        self._swarm: SwarmThread[Node] | None = None
        self._links: ThrottledTransport | None = None
        self._loop: OuterLoop | None = None
        self._is_closed = False

    def looked(self, look: Look) -> None:
        """Judge a look, where a commit leaves the anchor: not beside overlap, nor of one of several fragments."""
        outer = self.settings.manifest.outer
        if outer.overlap == 0 and outer.fragments == 1:
            self.diagnosed.judge_look(look, held_out=self.settings.options["evaluate"] is not None)

    @property
    def founds(self) -> bool:
        """True where it begins the run, or goes on with it, by terms of its own: it was not invited."""
        return self.settings.invite is None

    @property
    def is_offline(self) -> bool:
        """Whether this peer, for whom the run is over, gets in touch with nobody."""
        return self.was_over and not self.settings.options["keep_serving"]

    @property
    def is_up(self) -> bool:
        """Whether there is a swarm side, with its node: another thread may ask while it is made."""
        return self._swarm is not None and self._swarm.has_node

    @property
    def has_begun(self) -> bool:
        """Whether there is an outer loop."""
        return self._loop is not None

    @property
    def network(self) -> NetworkSetup:
        """How it is reached; before the swarm side is up."""
        assert self._network is not None
        return self._network

    @network.setter
    def network(self, found: NetworkSetup) -> None:
        self._network = found

    @property
    def swarm(self) -> SwarmThread[Node]:
        """The swarm side, from before it joins."""
        assert self._swarm is not None
        return self._swarm

    @swarm.setter
    def swarm(self, made: SwarmThread[Node]) -> None:
        self._swarm = made

    @property
    def links(self) -> ThrottledTransport:
        """What holds to the caps, from before the swarm side is up."""
        assert self._links is not None
        return self._links

    @links.setter
    def links(self, made: ThrottledTransport) -> None:
        self._links = made

    @property
    def loop(self) -> OuterLoop:
        """The training side, once it stands at an anchor."""
        assert self._loop is not None
        return self._loop

    @loop.setter
    def loop(self, made: OuterLoop) -> None:
        self._loop = made

    @property
    def acts_before_inner_steps(self) -> bool:
        """Whether the run's method does something before inner steps; then this peer is one process."""
        return self.swarm.node.replica.method.overrides("before_inner_step")

    @property
    def invite(self) -> str:
        """The line that lets others join by way of this peer or of up to three more; empty while nobody could."""
        return self._invite(self.token)

    @property
    def invite_to_write(self) -> str:
        """The same without the admission token: for files, logs and whoever observes."""
        return self._invite(None)

    def _invite(self, token: str | None) -> str:
        reachable = self._swarm is not None and not self.is_offline
        addresses = self.swarm.node.directory.ways_in() if reachable else ()
        return str(Invite(self.settings.manifest.digest, addresses, token)) if addresses else ""

    def save_now(self) -> bool:
        """Write a checkpoint, and return when it is durable; False when this is no moment for one. Raises DiskError."""
        self.behind.wait()
        saved = self.loop.save()
        self.behind.wait()
        return saved

    def save_last(self) -> bool:
        """Bring the live model in step with the chain, and write the last checkpoint. Raises DiskError.

        False, and the user is told, where that cannot be: then the one before stays the newest.
        """
        gossips, why = self.swarm.node.gossip is not None, "a commit was still being applied"
        for _ in range(LAST_TRIES):
            if not run_blocking(self.loop.settle()):
                why = "a partner did not say whether it took its half of the last step" if gossips else why
                break
            if not self.settings.model.is_finite():
                why = "the model holds NaN or Inf"
                break
            if self.save_now():
                return True
        self.keeps_the_one_before(why)
        return False

    def save_after_error(self) -> bool:
        """The same when an error ended the training loop, which what fails here must not hide."""
        try:
            if saved := self.save_last():
                kept = "the state of the last inner step is kept in %s, where the same command goes on"
                logger.info(kept, self.settings.called, extra=PLAIN)
            return saved
        except Exception as failed:  # noqa: BLE001 - whatever it is, the error before it says more
            self.keeps_the_one_before(f"{type(failed).__name__}: {failed}")
            return False

    def keeps_the_one_before(self, why: str) -> None:
        """Tell the user that there is no last checkpoint."""
        self.announce("checkpoint_failed", {"round": self.swarm.node.outer_steps, "why": why})
        logger.warning(
            "no last checkpoint: %s; the next start in %s goes on from the one before", why, self.settings.called
        )

    def close(self, *, politely: bool = False) -> None:
        """End the swarm's side, saying goodbye when ``politely``, and close the files. A second time does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._swarm is not None:
            self._swarm.stop(politely=politely)
        with suppress(DecentralError):  # a last checkpoint was waited for before, where there was to be one
            self.behind.wait()
        self.store.close()
        self.announce.close()


def cause_of_being_behind(manifest: Manifest, *, held_out: bool) -> str:
    """Say why together is behind alone by these terms: see `likely_cause`."""
    from decentral.lab.trial import outer_gain  # the laboratory, which most peers never need

    lost, waits = relative_error(parse_compressor(manifest.compressor.chain)), manifest.compressor.feedback != "none"
    return likely_cause(outer_gain(manifest), lost, manifest.run.rounds, waits=waits, held_out=held_out)


# ---- a thread that writes ----
#
# One thing at a time, while training goes on: a slow disk holds nobody.


class WriteBehind:
    """Its methods are called on the training thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether what was begun last is not written yet."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, work: Callable[[], object]) -> None:
        """Start it; nothing may be in progress."""
        assert not self.busy, "one write at a time"
        self.check()
        self._thread = threading.Thread(target=self._run, args=(work,), name="checkpoint", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what ended the last write, once."""
        if not self.busy and self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Return when it is written. Raises what ended it."""
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(LOOK_EVERY)
        self.check()

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised on the thread that asked for it
            self._error = error


# ---- waiting for other members ----
#
# Before the first step.


@dataclass(frozen=True, slots=True)
class Gathering:
    """Waits on every process of a peer at once; ``part`` is there on the main one."""

    model: LiveModel
    part: Participation | None
    asked_to_leave: threading.Event

    def wait(self, count: int, enough: Callable[[Head], bool], give_up_at: float | None) -> None:
        """Until the chain's head has ``enough`` members: ``count``, for people. Raises NoPeersError."""
        with self.model.team.as_one():
            self._wait(count, enough, give_up_at)

    def _wait(self, count: int, enough: Callable[[Head], bool], give_up_at: float | None) -> None:
        while not self.model.share((), self._may_begin(count, enough), ())[0]:
            if self.part is not None and time_left(give_up_at) == 0.0:
                here = len(self.part.swarm.node.driver.head.members)
                raise NoPeersError(
                    f"{here} of {count} peers within the time given to join_timeout; start the others, then "
                    f"this one again in {self.part.settings.called}, where it goes on as the same peer, or wait for "
                    "fewer of them"
                )
            self.asked_to_leave.wait(LOOK_EVERY)

    def _may_begin(self, count: int, enough: Callable[[Head], bool]) -> bool:
        """On the main process: whether the wait is over, for whatever reason."""
        if self.part is None:
            return False
        loop, swarm = self.part.loop, self.part.swarm
        run_blocking(loop.end_if_over())
        begins = enough(swarm.node.driver.head) or loop.done or self.asked_to_leave.is_set() or not swarm.alive
        self.part.reporter.counters.waits_for(0 if begins else count)
        swarm.node.waits = not begins
        return begins


# ---- the place among the members ----
#
# It says which part of the data is this peer's own.


class Standing:
    """The place as of the last change of the membership."""

    def __init__(self, manifest: Manifest) -> None:
        self._steps = manifest.inner.steps // manifest.outer.fragments
        self._members: tuple[PeerId, ...] = ()
        self._place = ShardPlace()

    def place(self, node: Node) -> ShardPlace:
        """Where this peer stands now; one that no commit has let in yet counts itself."""
        members = tuple(sorted({*node.driver.head.members, node.driver.me}))
        if members != self._members:
            self._members = members
            rank, count = members.index(node.driver.me), len(members)
            self._place = ShardPlace(rank, count, self._steps * self._given(node, count))
        return self._place

    def _given(self, node: Node, count: int) -> int:
        """Contributions so far, of all peers; gossip commits none, but all make their steps."""
        return node.driver.head.contributions if node.gossip is None else node.gossip.step * count


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
    """Inside the step of an optimizer parameters and moments are of two moments; what fails at a boundary leaves part
    of it undone, but for Ctrl-C, which each of its parts is made for, as for a second signal.
    """
    return stage == "between" or (stage == "at_boundary" and kind in POLITE)


def end_of_run(part: Participation, asked_to_leave: threading.Event) -> None:
    """The run is over: how to have it, and, where that was wished, a stay for those who come late."""
    out = shlex.quote(str(part.settings.called))
    anew = "; a new run takes another folder, --out or join(out=...)" if part.was_over and part.founds else ""
    logger.info("This run is over: decentral export %s --to model/%s", out, anew, extra=PLAIN)
    if part.settings.options["keep_serving"]:
        until = "until Ctrl-C, or decentral leave --out"
        logger.info("its last state can be had here %s %s", until, out, extra=PLAIN)
        with suppress(KeyboardInterrupt):
            while not asked_to_leave.wait(LOOK_EVERY) and part.swarm.alive:
                pass


def end_before_the_run(part: Participation) -> None:
    """The loop ended by itself while the run goes on: often a script that counts its own steps."""
    made = f"{part.swarm.node.outer_steps} of {part.settings.manifest.run.rounds} rounds"
    logger.warning("left after %s; the run goes on without this peer; loop until peer.done", made, extra=PLAIN)
