"""A peer of a run inside the ``Trainer`` of Lightning. pip install 'decentral[lightning]'

    Trainer(callbacks=[DecentralCallback("run.toml")], max_epochs=-1).fit(module, loader)

The run's terms say when a round is due and when training ends; the Trainer does all else as ever. Its loggers get the
swarm's numbers after every round, under ``swarm/``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import Any, TypeVar, Unpack

import torch
from torch.utils.data import IterableDataset

import decentral
from decentral.errors import ConfigError
from decentral.integrations.callbacks import Entered, Run, World, check_goes_on, checkpoint_of
from decentral.observe.metrics import swarm_numbers
from decentral.peer import Peer
from decentral.peer.settings import PeerOptions, check_names
from decentral.plugins import to_install
from decentral.training.clocks import OwnClock

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
except ImportError as error:
    raise ConfigError(f"decentral.integrations.lightning needs Lightning; {to_install('lightning')}") from error

T = TypeVar("T")


class DecentralCallback(Callback):  # type: ignore[misc]  # its own types are looser than ours
    """Makes the module that a Trainer fits a peer's, from ``fit()`` until it returns.

    Args:
        run: as of ``decentral.join``: path of a ``run.toml``, a Manifest, or an invite line; None with ``preset=``.
        join: any option of ``decentral.join`` but the loop's own: ``preset=``, ``out=``, ``max_upload=`` and so on.

    Training stops when the run is over, or somebody asks for it (``decentral leave``). With ``ckpt_path`` module,
    optimizers, schedules and what is owed are those of the peer's own checkpoint, which is written beside each of
    Lightning's. An error inside ``fit()`` ends the peer, too.

    ``fit()`` raises what ``decentral.join`` does, and ConfigError where processes hold parts of the model (FSDP).
    """

    def __init__(self, run: Run = None, **join: Unpack[PeerOptions]) -> None:
        check_names(type(self).__name__, join, list(PeerOptions.__annotations__))
        self._run, self._join = run, join
        self._entered = Entered()
        self._kept: dict[str, Any] = {}  # of the run, in Lightning's checkpoints. Any: JSON
        self._logged = 0  # rounds

    @property
    def peer(self) -> Peer | None:
        """The peer, while ``fit()`` trains: its ``status()``, ``invite``, ``pause()``, ``leave()``."""
        return self._entered.peer

    def shard(self, dataset: Iterable[T]) -> IterableDataset[T]:
        """This peer's part of data that is streamed: every n-th item of it, for the module's loader.

        ``dataset``: what can only be walked through, in the same order on every peer; ConfigError for what has indices.
        """
        return self._entered.shard(dataset)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Enter the run; the module becomes the run's, or this peer's as it was when it left."""
        _check_whole(trainer)
        peer = decentral.join(
            self._run,
            pl_module,
            trainer.optimizers,
            accelerator=_world(trainer),
            scheduler=[_wrap_schedule(config) for config in trainer.lr_scheduler_configs] or None,
            **self._join,
        )
        check_goes_on(self._kept, peer, f"ckpt_path: {trainer.ckpt_path}")
        self._entered.enter(peer)
        self._kept, self._logged = checkpoint_of(peer), peer.round
        _tell_of_epochs(trainer, peer)
        trainer.should_stop = trainer.should_stop or peer.done

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Tell the run the loss and the loggers the round that has ended; stop when the run is over for this peer."""
        if self.peer is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor):
            self.peer.log(loss=loss * trainer.accumulate_grad_batches)  # by which Lightning has divided it
        if self.peer.round != self._logged:
            self._logged, numbers = self.peer.round, swarm_numbers(self.peer.status())
            for logger in trainer.loggers:
                logger.log_metrics(numbers, step=trainer.global_step)
        trainer.should_stop = trainer.should_stop or self.peer.done

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the run, with a checkpoint."""
        self._entered.leave()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave it as the error would have left a ``with`` block."""
        self._entered.leave(exception)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Write the peer's own checkpoint beside Lightning's."""
        if self.peer is not None:
            self.peer.save()

    def state_dict(self) -> dict[str, Any]:
        """In Lightning's checkpoints: which run and which folder, and neither invite nor token."""
        if self.peer is not None:
            self._kept = checkpoint_of(self.peer)
        return dict(self._kept)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what a checkpoint remembers."""
        self._kept = dict(state_dict)


def _counts_steps(config: Any) -> bool:  # Any: Lightning's LRSchedulerConfig
    return config.interval == "step" and config.frequency == 1 and not config.reduce_on_plateau


def _wrap_schedule(config: Any) -> Any:  # Any: as above, and as of join
    """The schedule, that of a newcomer to be moved on to where the run is if it counts inner steps."""
    return config.scheduler if _counts_steps(config) else OwnClock(config.scheduler)


def _tell_of_epochs(trainer: Trainer, peer: Peer) -> None:
    """Warn a newcomer of a schedule that begins at its start."""
    own = [config for config in trainer.lr_scheduler_configs if not _counts_steps(config)]
    if own and peer.progress and not peer.inner_steps and trainer.is_global_zero:
        logging.getLogger("decentral").warning(
            "the run has made %d of its %d rounds, and the %s begins at its start, as Lightning does not step it once "
            'for each inner step; with "interval": "step" it begins where the run is',
            *(peer.round, peer.manifest.run.rounds, type(own[0].scheduler).__name__),
        )


def _check_whole(trainer: Trainer) -> None:
    """ConfigError unless each process has the whole model."""
    if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
        raise ConfigError(
            f"DecentralCallback: {type(trainer.strategy).__name__} does not leave the whole model with each process, "
            'and a round needs all of it; use strategy="ddp", or devices=1'
        )


def _world(trainer: Trainer) -> World | None:
    """The processes of this peer; None: it is one. Lightning has begun their group, and accelerate takes it over."""
    if trainer.world_size == 1:
        return None
    os.environ.setdefault("RANK", str(trainer.global_rank))  # accelerate asks for it, and Lightning does not say it
    world = World(cpu=trainer.strategy.root_device.type == "cpu")
    if world.num_processes != trainer.world_size:
        raise ConfigError(
            f"DecentralCallback: Lightning has {trainer.world_size} processes, and accelerate, which was used before "
            f"in this one, {world.num_processes}; make no Accelerator in a script of Lightning's"
        )
    return world
