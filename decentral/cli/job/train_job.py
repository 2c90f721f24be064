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
from decentral.cli.job.steering import StatusPublisher, Steering
from decentral.cli.job.training_context import TrainingContext, set_up
from decentral.cli.stopping import Stop
from decentral.manifest import Manifest
from decentral.observe.beacon import Beacon
from decentral.observe.report import read_summary
from decentral.observe.status import Status
from decentral.observe.terminal import Display
from decentral.swarm.identity import Identity
from decentral.swarm.patience import time_left
from decentral.tasks.batches import batch_loader

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

    bench = set_up(manifest, options.out, options.data)
    peer = join(
        options.invite or manifest,
        bench.model,
        bench.optimizer,
        accelerator=bench.accelerator,
        out=options.out,
        listen=options.listen or None,
        transport=options.transport,
        relays=options.relays,
        lan=options.lan,
        scheduler=bench.scheduler,
        require_peers=options.require_peers,
        join_timeout=time_left(options.give_up_at),
        tokens_per_step=bench.tokens_per_step,
        on_nan=options.on_nan,
        keep_serving=options.keep_serving,
        max_upload=options.max_upload,
        max_download=options.max_download,
        daily_upload=options.daily_upload,
        admit=options.admit,
        commands=False,  # the job answers them: it pauses the training, too
        quiet=True,  # its display shows the same
    )
    steering = Steering(bench, peer)
    teller = StatusPublisher(
        peer, on_invite, trains_while_paused=steering.trains_while_paused, keeps_serving=options.keep_serving
    )
    with ExitStack() as stack:
        stack.enter_context(closing(bench.metrics))
        if bench.is_main:
            stack.enter_context(Beacon(options.out, teller, steering.obey, display=display))
        stack.enter_context(peer)
        stop.gently(steering.leave)
        if options.waits_for_company:
            peer.wait_for_company()
        _train_until_done(bench, peer)
        stop.gently(None)
        summary = _summary(bench, peer, left=steering.left) if bench.is_main else {}
        teller.end("left" if steering.left else "done")
        stop.gently(steering.leave if options.keep_serving else None)
        return summary


def _summary(bench: TrainingContext, peer: "Peer", *, left: bool) -> dict[str, Any]:
    """The one that is kept already where the run was over before: this process has done nothing that it could tell."""
    kept = read_summary(bench.out) if peer.was_over else None
    return kept or conclude(bench, peer, evaluate=not left)


def train_alone(manifest: Manifest, options: JobOptions, display: Display, stop: Stop) -> dict[str, Any]:
    """The same loop without a swarm, for as many inner steps as the run has or as the peer to pace has done."""
    from decentral.node.folder import keep_terms

    bench = set_up(manifest, options.out, options.data)
    keep_terms(options.out, manifest)
    interval = manifest.inner.steps // manifest.outer.fragments
    num_steps = manifest.run.rounds * interval
    pace = BaselinePace(options.pace) if options.pace is not None else None
    halted, over = Event(), Event()

    def halt(request: str = "leave") -> None:
        {"leave": halted.set, "pause": bench.running.clear, "resume": bench.running.set}[request]()
        if request == "leave":
            bench.running.set()

    def read() -> Status:
        return _alone(bench, halted.is_set(), done=over.is_set())

    def goes_on() -> bool:
        bench.running.wait()
        wanted = bench.num_steps < num_steps if pace is None else pace.may_step(bench.num_steps, halted)
        return wanted and not halted.is_set()

    with closing(bench.metrics), Beacon(options.out, read, halt, display=display):
        stop.gently(halt)
        for batch in _batches(bench, b"solo", 0):
            if not goes_on():
                break
            _inner_step(bench, batch)
            if bench.num_steps % interval == 0:
                record_round(bench, live_fragments(bench), progress_alone(bench))
        summary = conclude(bench, None, evaluate=not halted.is_set())
        over.set()
        return summary


def _train_until_done(bench: TrainingContext, peer: "Peer") -> None:
    last_round, bench.num_steps = peer.round, peer.inner_steps  # more than 0 when a checkpoint was resumed
    identity = Identity.load_or_create(bench.out / "identity.key").peer
    recent = RecentLoss(bench.manifest.inner.steps)
    for batch in _batches(bench, identity, bench.num_steps):
        bench.running.wait()
        if peer.done:
            return
        recent.add(_inner_step(bench, batch))
        if bench.is_main and bench.num_steps % LOG_EVERY == 0:
            peer.log(loss=recent.mean)
        if bench.is_main and peer.round != last_round:
            last_round = peer.round
            record_round(bench, peer.anchor(), progress_of(peer))
            if bench.held_out_loss is not None:
                peer.log(held_out_loss=bench.held_out_loss)


def _batches(bench: TrainingContext, identity: bytes, first_step: int) -> Iterator[dict[str, Tensor]]:
    processes = bench.accelerator.num_processes
    loader = batch_loader(
        bench.corpus.train,
        seed=bench.manifest.run.seed,
        peer=identity,
        batch_size=bench.manifest.data.batch_size,
        context=bench.manifest.model.context,
        first_step=first_step * processes,
    )
    return iter(bench.accelerator.prepare(loader))


def _inner_step(bench: TrainingContext, batch: dict[str, Tensor]) -> Tensor:
    bench.watch.step_begins()
    loss: Tensor = bench.model(**batch).loss
    bench.accelerator.backward(loss)
    if bench.manifest.inner.clip is not None:
        bench.accelerator.clip_grad_norm_(bench.model.parameters(), bench.manifest.inner.clip)
    bench.num_steps += 1
    bench.optimizer.step()  # a round may begin or end in here
    bench.scheduler.step()
    bench.optimizer.zero_grad()
    if bench.is_main and bench.num_steps % LOG_EVERY == 0:
        bench.loss = loss.item()
        bench.metrics.inner(bench.num_steps, loss=bench.loss, tokens=bench.num_steps * bench.tokens_per_step)
    return loss.detach()


def _alone(bench: TrainingContext, halted: bool, *, done: bool) -> Status:
    last, now = ("left", "leaving") if halted else ("done", "training" if bench.running.is_set() else "paused")
    return Status(
        state=last if done else now,
        run=bench.manifest.run.name,
        run_id=bench.manifest.digest.hex(),
        algorithm="solo",
        round=bench.num_steps // (bench.manifest.inner.steps // bench.manifest.outer.fragments),
        inner_steps=bench.num_steps,
        loss=bench.loss,
        held_out_loss=bench.held_out_loss,
    )
