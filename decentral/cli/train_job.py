"""The training loop behind ``start`` and ``join``: a causal language model under accelerate, with or
without a swarm.

What crosses the wire is the peer's business. This file trains what the manifest describes until the peer
is done, and leaves ``metrics.jsonl`` and ``summary.json`` behind.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from torch import Tensor

from decentral.cli.bench import Bench, set_up
from decentral.cli.measuring import FINAL_WINDOWS, ROUND_WINDOWS
from decentral.cli.pacing import Pace
from decentral.cli.stopping import Stop
from decentral.manifest import Manifest
from decentral.observe.beacon import Beacon
from decentral.observe.report import write_summary
from decentral.observe.status import Status
from decentral.observe.terminal import Display
from decentral.parameters import gather, schema_of
from decentral.swarm.identity import Identity
from decentral.tasks.batches import batch_loader

if TYPE_CHECKING:
    from decentral.peer import Peer

LOG_EVERY = 10  # inner steps between two logged losses: reading a loss waits for the device


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """What the command line says about this peer; what all peers agree on is in the manifest."""

    out: Path
    data: Path | None = None
    listen: tuple[str, ...] | None = None  # multiaddrs; None: all interfaces
    require_peers: int = 0
    join_timeout: float | None = None  # seconds
    invite: str | None = None  # None: this is the first peer
    pace: Path | None = None  # a baseline keeps in step with the peer that runs there


class Steering:
    """What people ask of a running job: from a signal, or from another command through the run directory."""

    def __init__(self, bench: Bench, peer: "Peer") -> None:
        self._bench, self._peer = bench, peer
        self.left = False

    def obey(self, request: str) -> None:
        """Do what one of ``leave``, ``pause``, ``resume`` asks."""
        {"leave": self.leave, "pause": self.pause, "resume": self.resume}[request]()

    def leave(self) -> None:
        """End at the next step boundary."""
        self.left = True
        self._peer.leave()
        self._bench.running.set()

    def pause(self) -> None:
        """Stop training. With several processes only contributing stops: the others would wait in a collective."""
        self._peer.pause()
        if self._bench.accelerator.num_processes == 1:
            self._bench.running.clear()

    def resume(self) -> None:
        """Train on."""
        self._peer.resume()
        self._bench.running.set()


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
        listen=options.listen,
        scheduler=bench.scheduler,
        require_peers=options.require_peers,
        join_timeout=options.join_timeout,
        tokens_per_step=bench.tokens_per_step,
    )
    steering, teller = Steering(bench, peer), Teller(peer, manifest, on_invite)
    with ExitStack() as stack:
        stack.enter_context(closing(bench.metrics))
        if bench.is_main:
            stack.enter_context(Beacon(options.out, teller, steering.obey, display=display))
        stack.enter_context(peer)
        stop.gently(steering.leave)
        _train_until_done(bench, peer)
        stop.gently(None)
        summary = _conclude(bench, peer, evaluate=not steering.left) if bench.is_main else {}
        teller.end("leaving" if steering.left else "done")
        return summary


def train_alone(manifest: Manifest, options: JobOptions, display: Display, stop: Stop) -> dict[str, Any]:
    """The same loop without a swarm, for as many inner steps as the run has or as the peer to pace has done."""
    bench = set_up(manifest, options.out, options.data)
    interval = manifest.inner.steps // manifest.outer.fragments
    num_steps = manifest.run.rounds * interval
    pace = Pace(options.pace) if options.pace is not None else None
    halted, over = Event(), Event()

    def halt(request: str = "leave") -> None:
        if request == "leave":
            halted.set()

    def read() -> Status:
        return _alone(bench, halted.is_set(), done=over.is_set())

    def goes_on() -> bool:
        wanted = bench.num_steps < num_steps if pace is None else pace.may_step(bench.num_steps, halted)
        return wanted and not halted.is_set()

    with closing(bench.metrics), Beacon(options.out, read, halt, display=display):
        stop.gently(halt)
        for batch in _batches(bench, b"solo", 0):
            if not goes_on():
                break
            _inner_step(bench, batch)
            if bench.num_steps % interval == 0:
                _outer_metrics(bench, _live_fragments(bench), {"round": bench.num_steps // interval})
        summary = _conclude(bench, None, evaluate=not halted.is_set())
        over.set()
        return summary


# ---- the loop ----


def _train_until_done(bench: Bench, peer: "Peer") -> None:
    last_round = peer.round
    identity = Identity.load_or_create(bench.out / "identity.key").peer
    for batch in _batches(bench, identity, peer.inner_steps):
        bench.running.wait()
        if peer.done:
            return
        loss = _inner_step(bench, batch)
        if bench.is_main and bench.num_steps % LOG_EVERY == 0:
            peer.log(loss=loss)
        if bench.is_main and peer.round != last_round:
            last_round = peer.round
            _outer_metrics(bench, peer.anchor(), _progress(peer))


def _batches(bench: Bench, identity: bytes, first_step: int) -> Iterator[dict[str, Tensor]]:
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


def _inner_step(bench: Bench, batch: dict[str, Tensor]) -> Tensor:
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
        bench.metrics.inner(bench.num_steps, loss=loss.item(), tokens=bench.num_steps * bench.tokens_per_step)
    return loss.detach()


# ---- what is written down ----


def _outer_metrics(bench: Bench, anchor: list[Tensor], progress: dict[str, object]) -> None:
    quality: dict[str, object] = {}
    if bench.judge.affordable(bench.watch.seconds):
        quality["bits_per_byte"] = bench.judge.bits_per_byte(anchor, num_windows=ROUND_WINDOWS)
    tokens = bench.num_steps * bench.tokens_per_step
    bench.metrics.outer(bench.num_steps, tokens=tokens, **quality, **progress)


def _progress(peer: "Peer") -> dict[str, object]:
    status = peer.status()
    return {
        "round": status.round,
        "members": len(status.members),
        "bytes_sent": status.bytes_sent,
        "bytes_received": status.bytes_received,
        "anchor_digest": status.anchor_digest,
    }


def _conclude(bench: Bench, peer: "Peer | None", *, evaluate: bool) -> dict[str, Any]:
    """Evaluate what was reached and write ``summary.json``. The peer is still there, so that laggards can ask it."""
    seconds, busy = bench.watch.seconds, bench.watch.busy
    summary: dict[str, Any] = {
        "algorithm": bench.manifest.outer.method,
        "solo": peer is None,
        "num_parameters": bench.num_parameters,
        "inner_steps": bench.num_steps if peer is None else peer.inner_steps,
        "tokens": bench.num_steps * bench.tokens_per_step,
        "seconds": seconds,
        "busy_seconds": busy,
        "utilisation": bench.watch.utilisation,
    }
    if peer is not None:
        summary |= {"peer": peer.status().peer, **_progress(peer)}
    if evaluate:
        anchor = _live_fragments(bench) if peer is None else peer.anchor()
        bits = bench.judge.bits_per_byte(anchor, num_windows=FINAL_WINDOWS)
        summary |= {"bits_per_byte": bits, "loss": bits * math.log(2)}
    write_summary(bench.out, summary)
    return summary


def _live_fragments(bench: Bench) -> list[Tensor]:
    bare = bench.accelerator.unwrap_model(bench.model)
    parameters = dict(bare.named_parameters())
    fragments = schema_of(bare, bench.manifest.outer.fragments).fragments
    return [gather(parameters, fragment) for fragment in fragments]


# ---- status ----


class Teller:
    """Tells the beacon how the peer is; hands its invite on once; keeps the last word when the peer has gone."""

    def __init__(self, peer: "Peer", manifest: Manifest, on_invite: Callable[[str], None]) -> None:
        self._peer, self._on_invite = peer, on_invite
        self._last = Status(run=manifest.run.name, run_id=manifest.digest.hex(), algorithm=manifest.outer.method)
        self._ended = ""

    def __call__(self) -> Status:
        """The status now."""
        if self._ended:
            return replace(self._last, state=self._ended)
        self._last = self._peer.status()
        if self._last.invite and self._on_invite is not _keep_quiet:
            self._on_invite(self._last.invite)
            self._on_invite = _keep_quiet
        return self._last

    def end(self, state: str) -> None:
        """From now on the peer is not asked any more."""
        self._ended = state


def _keep_quiet(invite: str) -> None:
    """The invite was told already."""


def _alone(bench: Bench, halted: bool, *, done: bool) -> Status:
    return Status(
        state="done" if done else "leaving" if halted else "training",
        run=bench.manifest.run.name,
        run_id=bench.manifest.digest.hex(),
        algorithm="solo",
        inner_steps=bench.num_steps,
    )
