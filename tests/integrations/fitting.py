"""What the tests of Lightning fit; imported by the one worker that runs them, as Lightning takes seconds to import."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from decentral.manifest import Manifest
from tests.integrations import tiny

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own imports
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    from decentral.integrations.lightning import DecentralCallback

__all__ = ["AtStep", "CSVLogger", "Line", "ModelCheckpoint", "alone", "data", "trainer"]


class Line(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, wanted = batch
        return nn.functional.mse_loss(self.net(inputs), wanted)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.0)
        slower = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": slower, "interval": "step"}}


class AtStep(Callback):
    def __init__(self, step: int, act: Any) -> None:
        self.step, self.act = step, act

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.act()


def alone(out: Path, manifest: Manifest | None, **given: Any) -> DecentralCallback:
    return DecentralCallback(manifest, **tiny.alone(out), **given)


def data() -> DataLoader[Any]:
    """Batches that are all the same: Lightning begins an epoch again when it resumes within one."""
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).repeat(10, 1)
    return DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=8)


def trainer(folder: Path, *callbacks: Callback, **chosen: Any) -> Trainer:
    given = {"max_epochs": 50, "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    given |= {"enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": folder}
    return Trainer(callbacks=list(callbacks), **(given | chosen))
