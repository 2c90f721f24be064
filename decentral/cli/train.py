"""The training loop behind ``start`` and ``join``: a causal language model under accelerate, with or without a swarm.

What crosses the wire is the peer's business. The loop trains what the manifest describes until the peer is done, and
leaves ``metrics.jsonl`` and ``summary.json`` behind.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch import Tensor

from decentral.cli.group import Stop
from decentral.cli.options import JobOptions
from decentral.cli.ports import metrics_beside, page_beside
from decentral.cli.training_context import RecentLoss, TrainingContext, set_up
from decentral.errors import DecentralError, DeviceError, UsageError
from decentral.manifest import Manifest
from decentral.node.folder import has_begun, keep_terms
from decentral.observe.beacon import Beacon
from decentral.observe.report import read_summary, write_summary
from decentral.observe.screen import Display
from decentral.observe.status import QUANTITIES, Status, is_running, number_of, read_status
from decentral.parameters import gather, schema_of
from decentral.peer import Peer, join
from decentral.peer.participation import settle_device
from decentral.peer.settings import JoinOptions
from decentral.preferences.controls import Controls
from decentral.preferences.preferences import Duty, Preferences
from decentral.quantities import time_left
from decentral.swarm.identity import Identity
from decentral.tasks.batches import batch_loader
from decentral.tensors.threads import ThreadsWanted
from decentral.training.clocks import OwnClock
from decentral.training.inner import inner_step

LOG_EVERY = 10  # inner steps between two logged losses: reading a loss waits for the device


def train_with_swarm(
    manifest: Manifest, options: JobOptions, display: Display, stop: Stop, on_invite: Callable[[str], None]
) -> dict[str, Any]:
    """Take part in a run until it is over or somebody asks to leave; returns what ``summary.json`` says.

    ``on_invite`` gets the invite, without a token, as soon as this peer can be reached, before it waits for anybody.
    """
    context = set_up(manifest, options.out, options.data, options.begins_from)
    asked: JoinOptions = {
        **options.join,
        "accelerator": context.accelerator,
        "out": options.out,
        "scheduler": [OwnClock(warm_up) for warm_up in context.schedulers],
        "alone": True,  # the job waits itself, below, which is no part of a step's time
        "join_timeout": time_left(options.give_up_at),
        "tokens_per_step": context.tokens_per_step,
        "commands": False,  # the job answers them: it pauses the training, too
        "quiet": True,  # its display shows the same
    }
    peer = join(options.invite or manifest, context.model, context.optimizers, **asked)
    keep_serving = options.join.get("keep_serving", False)
    steering = Steering(context, peer)
    controls = Controls(steering, options.preferences, folder=options.out if context.is_main else None)
    teller = StatusPublisher(
        peer,
        on_invite,
        controls.look,
        sample=lambda: context.sample,
        trains_while_paused=steering.trains_while_paused,
        keeps_serving=keep_serving,
    )
    with ExitStack() as stack:
        stack.enter_context(closing(context.metrics))
        if context.is_main:
            begun = has_begun(options.out)
            stack.enter_context(metrics_beside(options.out, options.metrics, display.say))  # tells the last word, too
            stack.enter_context(Beacon(options.out, teller, controls.obey, display=display, begun=begun))
            stack.enter_context(page_beside(options.out, display.say, wanted=options.dashboard))
        stack.push(teller.take_back)
        stack.enter_context(peer)
        if context.is_main and (donor := peer.swarm.node.text) is not None:
            donor.text = context.corpus.text.numpy().data
        stop.gently(steering.leave)
        if options.waits_for_company:
            peer.wait_for_company()
        _train_until_done(context, peer, shares=options.join.get("share", False))
        stop.gently(None)
        left = steering.left or peer.left
        summary = _summary(context, peer, left=steering.left) if context.is_main else {}
        teller.end("left" if left else "done")
        stop.gently(steering.leave if keep_serving else None)
    if controls.too_large:
        raise DeviceError(controls.too_large)
    return summary


def _summary(context: TrainingContext, peer: Peer, *, left: bool) -> dict[str, Any]:
    """The one that is kept already where the run was over before: this process has done nothing that it could tell."""
    kept = read_summary(context.out) if peer.was_over else None
    return kept or conclude(context, peer, evaluate=not left)


def train_alone(manifest: Manifest, options: JobOptions, display: Display, stop: Stop) -> dict[str, Any]:
    """The same loop without a swarm, for as many inner steps as the run has or as the peer to pace has done."""
    context = set_up(manifest, options.out, options.data, options.begins_from)
    keep_terms(options.out, manifest)
    interval = manifest.inner.steps // manifest.outer.fragments
    num_steps = manifest.run.rounds * interval
    pace = BaselinePace(options.pace) if options.pace is not None else None
    halted, over = Event(), Event()
    steering = SteeringAlone(context, halted)
    controls = Controls(steering, options.preferences, folder=options.out if context.is_main else None)

    def read() -> Status:
        return controls.look(_status_alone(context, halted.is_set(), done=over.is_set()))

    def goes_on() -> bool:
        context.wait_while_paused()
        wanted = context.num_steps < num_steps if pace is None else pace.may_step(context.num_steps, halted)
        return wanted and not halted.is_set()

    page = page_beside(options.out, display.say, wanted=options.dashboard)
    numbers = metrics_beside(options.out, options.metrics, display.say)
    with (
        closing(context.metrics),
        Beacon(options.out, read, controls.obey, display=display, begun=has_begun(options.out)),
        page,
        numbers,
    ):
        stop.gently(steering.leave)
        for batch in _batches(context, b"solo", 0):
            if not goes_on():
                break
            _inner_step(context, batch)
            steering.rest()
            if context.num_steps % interval == 0:
                record_round(context, live_fragments(context), progress_alone(context))
        summary = conclude(context, None, evaluate=not halted.is_set())
        over.set()
    if controls.too_large:
        raise DeviceError(controls.too_large)
    return summary


def _train_until_done(context: TrainingContext, peer: Peer, *, shares: bool) -> None:
    last_round, context.num_steps = peer.round, peer.inner_steps  # more than 0 when a checkpoint was resumed
    identity = Identity.load_or_create(context.out / "identity.key").peer
    recent = RecentLoss(context.manifest.inner.steps)
    for batch in _batches(context, identity, context.num_steps):
        context.wait_while_paused()
        if peer.done:
            return
        loss = _inner_step(context, batch) if not shares else _inner_step_of_stage(context, batch, peer)
        if loss is None:  # the replica came apart, or the run is over
            continue
        recent.add(loss)
        if context.is_main and context.num_steps % LOG_EVERY == 0:
            peer.log(loss=recent.mean)
        if context.is_main and peer.round != last_round:
            last_round = peer.round
            record_round(context, peer.anchor(), progress_of(peer))
            if context.held_out_loss is not None:
                peer.log(held_out_loss=context.held_out_loss)


def _batches(context: TrainingContext, identity: bytes, first_step: int) -> Iterator[dict[str, Tensor]]:
    processes = context.accelerator.num_processes
    loader = batch_loader(
        context.corpus.train,
        seed=context.manifest.run.seed,
        peer=identity,
        batch_size=context.manifest.data.batch_size,
        context=context.manifest.model.context,
        first_step=first_step * processes,
    )
    return iter(context.accelerator.prepare(loader))


def _inner_step(context: TrainingContext, batch: dict[str, Tensor]) -> Tensor:
    context.watch.step_begins()

    def backward(loss: Tensor) -> None:
        context.accelerator.backward(loss)
        if context.manifest.inner.clip is not None:
            context.accelerator.clip_grad_norm_(context.model.parameters(), context.manifest.inner.clip)

    return _step(context, lambda: context.model(**batch).loss, backward)


def _inner_step_of_stage(context: TrainingContext, batch: dict[str, Tensor], peer: Peer) -> Tensor | None:
    """Make one with the other machines of the replica; None where none could be made."""
    context.watch.step_begins()
    model = context.accelerator.unwrap_model(context.model)
    found = peer.gradients(batch["input_ids"], batch["labels"], model.loss, clip=context.manifest.inner.clip)
    if found is None:
        context.model.zero_grad()
        return None
    loss = torch.tensor(found, dtype=torch.float32, device="cpu")
    return _step(context, lambda: loss, lambda loss: None)


def _step(context: TrainingContext, loss: Callable[[], Tensor], backward: Callable[[Tensor], object]) -> Tensor:
    def begins() -> None:
        context.num_steps += 1

    value = inner_step(context.manifest.inner, context.optimizers, loss, backward=backward, begins=begins)
    for scheduler in context.schedulers:
        scheduler.step()
    context.model.zero_grad()
    if context.is_main and context.num_steps % LOG_EVERY == 0:
        context.loss = value.item()
        context.metrics.inner(context.num_steps, loss=context.loss, tokens=context.num_steps * context.tokens_per_step)
    return value.detach()


def _status_alone(context: TrainingContext, halted: bool, *, done: bool) -> Status:
    last, now = ("left", "leaving") if halted else ("done", "training" if context.running.is_set() else "paused")
    return Status(
        state=last if done else now,
        run=context.manifest.run.name,
        run_id=context.manifest.digest.hex(),
        algorithm="solo",
        round=context.num_steps // (context.manifest.inner.steps // context.manifest.outer.fragments),
        inner_steps=context.num_steps,
        loss=context.loss,
        held_out_loss=context.held_out_loss,
        sample=context.sample,
    )


# ---- a running job and the people around it ----
#
# They ask something of it, and it tells them something.


class Steering:
    """The requests of people to a running job: from a signal, or from another command through the run directory."""

    def __init__(self, context: TrainingContext, peer: Peer) -> None:
        self._context, self._peer = context, peer
        self.left = False

    def leave(self) -> None:
        """End at the next step boundary."""
        self.left = True
        self._peer.leave()
        self._context.running.set()

    def finish(self) -> None:
        """End with the next round that is committed; at once where none comes."""
        if self._peer.rests:
            self.leave()
        else:
            self._peer.finish()

    def limit(self, wanted: Preferences) -> None:
        """Hold to these rates, and compute with so many threads."""
        self._peer.limit(wanted)

    @property
    def trains_while_paused(self) -> bool:
        """With several processes only contributing stops: the others would wait in a collective."""
        return bool(self._context.accelerator.num_processes > 1)

    def pause(self) -> None:
        """Stop training, as far as that can be."""
        self._peer.pause()
        if not self.trains_while_paused:
            self._context.running.clear()

    def resume(self) -> None:
        """Train on."""
        self._peer.resume()
        self._context.running.set()


class SteeringAlone:
    """The requests of people to a baseline: it has no rounds, and no lines to others."""

    def __init__(self, context: TrainingContext, halted: Event) -> None:
        self._context, self._halted = context, halted
        self._duty, self._threads = Duty(time.monotonic, settle_device), ThreadsWanted()

    def leave(self) -> None:
        """End at the next step."""
        self._halted.set()
        self._context.running.set()

    finish = leave

    def pause(self) -> None:
        """Stop training."""
        self._context.running.clear()

    def resume(self) -> None:
        """Train on."""
        self._context.running.set()

    def limit(self, wanted: Preferences) -> None:
        """Compute with so many threads, and for such a share of the time."""
        self._threads.want(wanted.threads)
        self._duty.share = wanted.max_compute or 1.0

    def rest(self) -> None:
        """After an inner step, for as long as that share asks for."""
        if seconds := self._duty.seconds_to_rest():
            self._halted.wait(seconds)
        self._duty.goes_on()


class StatusPublisher:
    """Tells the beacon how the peer is; hands its invite on once; has the last word when the peer has gone.

    ``look`` acts on a status before it is told, and adds to it; ``sample``: what the model says.
    """

    def __init__(
        self,
        peer: Peer,
        on_invite: Callable[[str], None],
        look: Callable[[Status], Status] = lambda status: status,
        *,
        sample: Callable[[], Mapping[str, object]] = dict,
        trains_while_paused: bool,
        keeps_serving: bool = False,
    ) -> None:
        self._peer, self._on_invite, self._look = peer, on_invite, look
        self._trains_while_paused, self._keeps_serving, self._sample = trains_while_paused, keeps_serving, sample
        self._ended = ""

    def __call__(self) -> Status:
        """The status now; the last one that there was, once the peer's swarm side has ended."""
        status = replace(
            self._peer.status(),
            own_loop=False,
            trains_while_paused=self._trains_while_paused,
            sample=self._sample(),
        )
        if self._ended:
            return replace(status, state=self._ended)
        if status.invite and self._on_invite is not _keep_quiet and self._lets_in(status):
            self._on_invite(status.invite)
            self._on_invite = _keep_quiet
        return self._look(status)

    def _lets_in(self, status: Status) -> bool:
        """Not who is no member: it may have come after the run's end, and goes at once then.

        Before it has the others' chain, a peer knows itself alone.
        """
        member = any(member.get("self") for member in status.members)
        return status.state not in ("starting", "syncing") and (member or self._keeps_serving)

    def end(self, state: str) -> None:
        """From now on this is its state, whatever else is new."""
        self()  # a run that took less than a second has an invite, too
        self._ended = state

    def take_back(self, kind: type[BaseException] | None, *_: object) -> None:
        """An error came after all, as on a full disk: it did not end as was said. As the exit of a block.

        A Ctrl-C while it says goodbye is none: everything is kept by then.
        """
        if kind is not None and issubclass(kind, Exception):
            self._ended = ""


def _keep_quiet(invite: str) -> None:
    """The invite was told already."""


# ---- rows and a summary ----
#
# A row per round in ``metrics.jsonl``, and ``summary.json`` at the end.


def record_round(
    context: TrainingContext, anchor: list[Tensor], progress: dict[str, object], *, evaluate: bool = False
) -> float | None:
    """Write a row of the state after a round; its bits per byte when that was asked for or takes little of the time."""
    bits = None
    if evaluate or context.judge.affordable(context.watch.seconds):
        bits = context.judge.bits_per_byte(anchor)
        context.held_out_loss = bits * math.log(2)
    if said := context.judge.sample(anchor, context.watch.seconds):
        context.sample = {**said, "round": progress["round"]}
    tokens = context.num_steps * context.tokens_per_step
    quality = {} if bits is None else {"bits_per_byte": bits}
    context.metrics.outer(context.num_steps, tokens=tokens, **quality, **progress)
    return bits


def progress_of(peer: Peer) -> dict[str, object]:
    """Where a peer of a swarm is, and what it cost so far."""
    return progress_of_status(peer.status())


def progress_of_status(status: Status) -> dict[str, object]:
    """Progress out of a status; figures that the round could not tell are not there."""
    logged = {name: number_of(status, name) for name, quantity in QUANTITIES.items() if quantity.logged}
    return {
        **{name: number for name, number in logged.items() if number is not None},
        "anchor_digest": status.anchor_digest,
        **status.diagnostics,
        **({"diagnosed_round": status.diagnosed_round} if status.diagnostics else {}),
    }


def progress_alone(context: TrainingContext) -> dict[str, object]:
    """Progress of a baseline: rounds are the intervals at which a swarm would have met."""
    interval = context.manifest.inner.steps // context.manifest.outer.fragments
    return {"round": context.num_steps // interval, "members": 1, "bytes_sent": 0, "bytes_received": 0}


def conclude(context: TrainingContext, peer: Peer | None, *, evaluate: bool) -> dict[str, Any]:
    """Evaluate what was reached and write ``summary.json``. The peer is still there, so that laggards can ask it."""
    seconds, busy = context.watch.seconds, context.watch.busy
    summary: dict[str, Any] = {
        "algorithm": context.manifest.outer.method,
        "solo": peer is None,
        "num_parameters": context.num_parameters,
        "inner_steps": context.num_steps,
        "tokens": context.num_steps * context.tokens_per_step,
        "seconds": seconds,
        "busy_seconds": busy,
        "utilisation": context.watch.utilisation,
    }
    progress = progress_alone(context) if peer is None else progress_of(peer)
    summary |= {"peer": "" if peer is None else peer.status().peer, **progress}
    summary |= {} if peer is None else _totals_of(peer.status())
    if evaluate:
        anchor = live_fragments(context) if peer is None else peer.anchor()
        bits = record_round(context, anchor, progress, evaluate=True)
        assert bits is not None, "it was asked for"
        summary |= {"bits_per_byte": bits, "loss": bits * math.log(2)}
        if peer is not None:
            peer.log(held_out_loss=bits * math.log(2))  # the last status tells of the last anchor
    write_summary(context.out, summary)
    return summary


def _totals_of(status: Status) -> dict[str, object]:
    """Totals of the peer over all its lives, as its status has them."""
    names = ("given_rounds", "given_tokens", "given_seconds", "given_bytes", "given_share")
    return {name: getattr(status, name) for name in names}


def live_fragments(context: TrainingContext) -> list[Tensor]:
    """Return what was learnt so far, fragment by fragment, flat float32: the average, of an optimizer that has one."""
    bare = context.accelerator.unwrap_model(context.model)
    parameters = dict(bare.named_parameters())
    outer = context.manifest.outer
    fragments = schema_of(bare, outer.fragments, layout=outer.fragment_layout).fragments
    context.averages.show()
    held = [gather(parameters, fragment) for fragment in fragments]
    context.averages.resume()
    return held


# ---- a baseline in step with its peer ----
#
# It is never ahead of the peer that it is compared to, and ends where that ended.

_LOOK_SECONDS = 0.25


class BaselinePace:
    """How many inner steps a baseline may do, read from the status of the peer that runs in ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._limit = 0
        self._over = False

    def may_step(self, num_steps: int, halted: Event) -> bool:
        """Wait until the peer is ahead of ``num_steps``; False once it has ended there, or when ``halted`` is set.

        Raises DecentralError when the peer died on the way: there is nothing to compare to then.
        """
        while num_steps >= self._limit and not self._over:
            self._look()
            if num_steps >= self._limit and not self._over and halted.wait(_LOOK_SECONDS):
                return False
        return num_steps < self._limit

    def _look(self) -> None:
        try:
            status = read_status(self._directory)
        except UsageError:  # it has not written one yet
            return
        self._limit = status.inner_steps
        self._over = status.state == "done"
        if not self._over and not is_running(status) and not self._has_ended_well(status):
            raise DecentralError(f"{self._directory}: the peer to keep pace with has died; see its stderr and events")

    def _has_ended_well(self, before: Status) -> bool:
        """Tell whether it wrote its last word between our reading the file and looking for its process."""
        last = read_status(self._directory)
        self._limit = last.inner_steps
        self._over = last.state == "done"
        return self._over or last.pid != before.pid
