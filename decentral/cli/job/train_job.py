"""The training loop behind ``start`` and ``join``: a causal language model under accelerate, with or
without a swarm.

What crosses the wire is the peer's business. This file trains what the manifest describes until the peer
is done, and leaves ``metrics.jsonl`` and ``summary.json`` behind.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from threading import Event
from typing import TYPE_CHECKING, Any

from torch import Tensor

from decentral.cli.job.measuring import RecentLoss
from decentral.cli.job.options import JobOptions
from decentral.cli.job.pacing import BaselinePace
from decentral.cli.job.recording import conclude, live_fragments, progress_alone, progress_of, record_round
from decentral.cli.job.steering import StatusPublisher, Steering, SteeringAlone
from decentral.cli.job.training_context import TrainingContext, set_up
from decentral.cli.metrics_port import metrics_beside
from decentral.cli.page import page_beside
from decentral.cli.stopping import Stop
from decentral.errors import DeviceError
from decentral.manifest import Manifest
from decentral.node.folder import has_begun
from decentral.observe.beacon import Beacon
from decentral.observe.report import read_summary
from decentral.observe.screen import Display
from decentral.observe.status import Status
from decentral.preferences.controls import Controls
from decentral.swarm.identity import Identity
from decentral.swarm.patience import time_left
from decentral.tasks.batches import batch_loader
from decentral.training.inner import inner_step

if TYPE_CHECKING:
    from decentral.peer import Peer

LOG_EVERY = 10  # inner steps between two logged losses: reading a loss waits for the device


def train_with_swarm(
    manifest: Manifest, options: JobOptions, display: Display, stop: Stop, on_invite: Callable[[str], None]
) -> dict[str, Any]:
    """Take part in a run until it is over or somebody asks to leave; returns what ``summary.json`` says.

    ``on_invite`` gets the invite as soon as this peer can be reached, before it waits for anybody.
    """
    from decentral.peer import join  # brings hivemind along, which a solo peer does not need

    context = set_up(manifest, options.out, options.data, options.begins_from)
    peer = join(
        options.invite or manifest,
        context.model,
        context.optimizers,
        accelerator=context.accelerator,
        out=options.out,
        listen=options.listen or None,
        transport=options.transport,
        relays=options.relays,
        lan=options.lan,
        scheduler=context.schedulers,
        require_peers=options.require_peers,
        join_timeout=time_left(options.give_up_at),
        tokens_per_step=context.tokens_per_step,
        on_nan=options.on_nan,
        keep_serving=options.keep_serving,
        offload=options.offload,
        max_upload=options.max_upload,
        max_download=options.max_download,
        daily_upload=options.daily_upload,
        admit=options.admit,
        commands=False,  # the job answers them: it pauses the training, too
        quiet=True,  # its display shows the same
    )
    steering = Steering(context, peer)
    controls = Controls(steering, options.preferences, folder=options.out if context.is_main else None)
    teller = StatusPublisher(
        peer,
        on_invite,
        controls.look,
        trains_while_paused=steering.trains_while_paused,
        keeps_serving=options.keep_serving,
    )
    with ExitStack() as stack:
        stack.enter_context(closing(context.metrics))
        if context.is_main:
            begun = has_begun(options.out)
            stack.enter_context(Beacon(options.out, teller, controls.obey, display=display, begun=begun))
            stack.enter_context(page_beside(options.out, display.say, wanted=options.dashboard))
            stack.enter_context(metrics_beside(options.out, options.metrics, display.say))
        stack.push(teller.take_back)
        stack.enter_context(peer)
        stop.gently(steering.leave)
        if options.waits_for_company:
            peer.wait_for_company()
        _train_until_done(context, peer)
        stop.gently(None)
        left = steering.left or peer.left
        summary = _summary(context, peer, left=steering.left) if context.is_main else {}
        teller.end("left" if left else "done")
        stop.gently(steering.leave if options.keep_serving else None)
    if controls.too_large:
        raise DeviceError(controls.too_large)
    return summary


def _summary(context: TrainingContext, peer: "Peer", *, left: bool) -> dict[str, Any]:
    """The one that is kept already where the run was over before: this process has done nothing that it could tell."""
    kept = read_summary(context.out) if peer.was_over else None
    return kept or conclude(context, peer, evaluate=not left)


def train_alone(manifest: Manifest, options: JobOptions, display: Display, stop: Stop) -> dict[str, Any]:
    """The same loop without a swarm, for as many inner steps as the run has or as the peer to pace has done."""
    from decentral.node.folder import keep_terms

    context = set_up(manifest, options.out, options.data, options.begins_from)
    keep_terms(options.out, manifest)
    interval = manifest.inner.steps // manifest.outer.fragments
    num_steps = manifest.run.rounds * interval
    pace = BaselinePace(options.pace) if options.pace is not None else None
    halted, over = Event(), Event()
    steering = SteeringAlone(context, halted)
    controls = Controls(steering, options.preferences, folder=options.out if context.is_main else None)

    def read() -> Status:
        return controls.look(_alone(context, halted.is_set(), done=over.is_set()))

    def goes_on() -> bool:
        context.running.wait()
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


def _train_until_done(context: TrainingContext, peer: "Peer") -> None:
    last_round, context.num_steps = peer.round, peer.inner_steps  # more than 0 when a checkpoint was resumed
    identity = Identity.load_or_create(context.out / "identity.key").peer
    recent = RecentLoss(context.manifest.inner.steps)
    for batch in _batches(context, identity, context.num_steps):
        context.running.wait()
        if peer.done:
            return
        recent.add(_inner_step(context, batch))
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

    def begins() -> None:
        context.num_steps += 1

    loss = inner_step(
        context.manifest.inner,
        context.optimizers,
        lambda: context.model(**batch).loss,
        backward=backward,
        begins=begins,
    )
    for scheduler in context.schedulers:
        scheduler.step()
    context.model.zero_grad()
    if context.is_main and context.num_steps % LOG_EVERY == 0:
        context.loss = loss.item()
        context.metrics.inner(context.num_steps, loss=context.loss, tokens=context.num_steps * context.tokens_per_step)
    return loss.detach()


def _alone(context: TrainingContext, halted: bool, *, done: bool) -> Status:
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
    )
