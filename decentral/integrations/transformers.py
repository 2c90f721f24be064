"""A peer of a run inside the ``Trainer`` of transformers. pip install 'decentral[transformers]'

    Trainer(model, args, train_dataset=data, callbacks=[DecentralCallback("run.toml")]).train()

The run's terms say when a round is due and when training ends; the Trainer does all else as ever. What is trained on,
logged to and evaluated stays its own: numbers of the swarm are in its logs under ``swarm/``.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import torch
from torch import nn
from torch.utils.data import IterableDataset

import decentral
from decentral.errors import ConfigError
from decentral.integrations.callbacks import (
    Entered,
    Run,
    World,
    check_goes_on,
    check_whole,
    checkpoint_of,
    draw_in_own_order,
    options_to_keep,
    read_back,
)
from decentral.observe.metrics import swarm_numbers
from decentral.peer import Peer
from decentral.peer.settings import FOUNDING, PeerOptions, check_names
from decentral.plugins import to_install
from decentral.training.clocks import Scheduler

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import CallbackHandler, ExportableState
except ImportError as error:
    raise ConfigError(
        f"decentral.integrations.transformers needs transformers; {to_install('transformers')}"
    ) from error

T = TypeVar("T")


class DecentralCallback(TrainerCallback, ExportableState):  # type: ignore[misc]  # transformers is untyped
    """Makes the model that a Trainer trains a peer's, from ``train()`` until it returns.

    Args:
        run: as of ``decentral.join``: path of a ``run.toml``, a Manifest, or an invite line; None with ``preset=``.
        join: any option of ``decentral.join`` but the loop's own: ``preset=``, ``out=``, ``max_upload=`` and so on.

    Training stops when the run is over, or somebody asks for it (``decentral leave``). With ``resume_from_checkpoint``
    model, optimizer, schedule and what is owed are those of the peer's own checkpoint, which is written beside each of
    the Trainer's; the Trainer's says where in the data and in its counts training goes on.

    ``train()`` raises what ``decentral.join`` does, and ConfigError where processes hold parts of the model (FSDP,
    DeepSpeed). After an error inside ``train()`` the peer leaves when the process ends, the next ``train()`` begins, or
    a ``with`` block around it is left.
    """

    def __init__(self, run: Run = None, **join: Unpack[PeerOptions]) -> None:
        check_names(type(self).__name__, join, list(PeerOptions.__annotations__))
        self._run, self._join = run, join
        self._entered = Entered()
        self.kept: dict[str, Any] = {}  # of the run, in the Trainer's checkpoints. Any: JSON

    @property
    def peer(self) -> Peer | None:
        """The peer, while ``train()`` runs: its ``status()``, ``invite``, ``pause()``, ``leave()``."""
        return self._entered.peer

    def shard(self, dataset: Iterable[T]) -> IterableDataset[T]:
        """This peer's part of data that is streamed: every n-th item of it, for ``train_dataset``.

        ``dataset``: what can only be walked through, in the same order on every peer; ConfigError for what has indices.
        """
        return self._entered.shard(dataset)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.leave(error)

    # ---- what the Trainer calls ----

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: Scheduler | None = None,
        train_dataloader: object = None,
        **_: object,
    ) -> None:
        """Enter the run; the model becomes the run's, or this peer's as it was when it left."""
        check_whole(type(self).__name__)
        _before_trackers(self)
        peer = decentral.join(self._run, model, optimizer, accelerator=World(), scheduler=lr_scheduler, **self._join)
        before = (state.stateful_callbacks.get(type(self).__name__) or {}).get("attributes", {})
        check_goes_on(before.get("kept", {}), peer, f"resume_from_checkpoint: a checkpoint of {args.output_dir}")
        self._entered.enter(peer)
        self.kept = checkpoint_of(peer)
        draw_in_own_order(train_dataloader, peer.seed)
        _warn_if_short(state.max_steps - state.global_step, peer, state.max_steps)
        if peer.done:  # the folder held the end of the run
            control.should_training_stop = True
            control.should_epoch_stop = True

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> TrainerControl:
        """Stop when the run is over for this peer."""
        if self.peer is not None and self.peer.done:
            control.should_training_stop = True
        return control

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Write the peer's own checkpoint beside the Trainer's."""
        if self.peer is not None:
            self.peer.save()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: object,
    ) -> None:
        """Tell the run the losses, and the Trainer's logs what the run is like."""
        if self.peer is None or logs is None:
            return
        if state.is_world_process_zero:
            _exchange(self.peer, state, logs)
        if args.load_best_model_at_end and "train_loss" in logs:
            self._entered.leave()  # its last word: next it may put an older model in the place of what was trained

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Leave the run, with a checkpoint."""
        self._entered.leave()

    # ---- what is in the Trainer's checkpoints ----

    def state(self) -> dict[str, Any]:
        """To make this callback again, with ``restore_callback_states_from_checkpoint``, but for what is no JSON.

        No invite and no token is in there, as checkpoints are shared: the run's folder has both.
        """
        if self.peer is not None:
            self.kept = checkpoint_of(self.peer)
        folder, run, join = self.kept.get("out"), None, options_to_keep(self._join)
        if folder is not None:  # it has the terms, also those that a preset founded the run by
            run = str(Path(folder) / "run.toml")
            join = {name: value for name, value in join.items() if name not in FOUNDING} | {"out": folder}
        return {
            "args": {"run": run, **join},
            "attributes": {"kept": self.kept},
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> DecentralCallback:
        """The callback that ``state()`` was asked for."""
        given = dict(state["args"])
        made = cls(given.pop("run"), **read_back(given))
        made.kept = dict(state["attributes"]["kept"])
        return made


_LOSSES = {"loss": "loss", "eval_loss": "held_out_loss"}  # the Trainer's names, ours


def _exchange(peer: Peer, state: TrainerState, logs: dict[str, float]) -> None:
    """The Trainer's losses to the peer, the swarm's numbers to the Trainer."""
    told = {ours: logs[theirs] for theirs, ours in _LOSSES.items() if theirs in logs}
    if told:
        peer.log(**told)
    numbers = swarm_numbers(peer.status())
    logs.update(numbers)
    if state.log_history:  # it has a copy, made before
        state.log_history[-1].update(numbers)


def _warn_if_short(steps: int, peer: Peer, in_all: int) -> None:
    """Say at the beginning, and not after hours, that the Trainer has fewer ``steps`` left than the run, or that its
    schedule is stretched over fewer than the run's: ``in_all``.
    """
    rounds = peer.manifest.run.rounds - peer.round
    each = peer.manifest.inner.steps / peer.manifest.outer.fragments
    wanted, whole = int(rounds * each), int(peer.manifest.run.rounds * each)
    if wanted <= steps and in_all < whole and World().is_main_process:
        logging.getLogger("decentral").warning(
            "the Trainer's schedule is stretched over max_steps = %d, and the run, which is some rounds on, has %d "
            "steps; with max_steps = %d this peer trains at the rate that the others have",
            *(in_all, whole, whole),
        )
    if steps < wanted and World().is_main_process:
        logging.getLogger("decentral").warning(
            "the Trainer ends after %d more steps, and the run's %d more rounds take about %d: it leaves the run then; "
            "raise max_steps or num_train_epochs to go along to the end",
            *(steps, rounds, wanted),
        )


def _before_trackers(callback: DecentralCallback) -> None:
    """Stand before the callbacks that log to trackers, so that what is added to the logs reaches them, too.

    The Trainer puts its own callbacks first, and tells a callback neither of the others nor of itself: the list is
    found with the caller. Behind the first one, which decides what is due in a step. Where there is none, as in a test,
    nothing is done, and the numbers reach the callbacks that come later.
    """
    frame = sys._getframe(1)
    while frame is not None and not isinstance(frame.f_locals.get("self"), CallbackHandler):
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    callbacks = [] if frame is None else frame.f_locals["self"].callbacks
    if callback in callbacks[2:]:
        callbacks.remove(callback)  # the Trainer is walking the list: those in between move into the gap behind it
        callbacks.insert(1, callback)
