"""A Trainer of Lightning with a DecentralCallback, alone over a network in memory."""

from __future__ import annotations

import csv
import importlib
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from decentral.errors import ConfigError
from decentral.manifest import Manifest
from decentral.swarm.identity import Identity
from decentral.transport.memory.transport import MemoryNetwork
from tests.integrations.test_transformers import terms

pytest.importorskip("lightning")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own imports
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    from decentral.integrations.lightning import DecentralCallback

pytestmark = pytest.mark.filterwarnings("ignore")  # it warns of a loader with one worker, of its own checkpoints


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


def alone(out: Path, manifest: Manifest) -> DecentralCallback:
    identity = Identity.load_or_create(out / "identity.key")
    transport = MemoryNetwork().transport(identity.signer)
    return DecentralCallback(manifest, out=out, transport=transport, quiet=True, lan=False)


def data() -> DataLoader[Any]:
    """Batches that are all the same: Lightning begins an epoch again when it resumes within one."""
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).repeat(10, 1)
    return DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=8)


def trainer(folder: Path, *callbacks: Callback, **chosen: Any) -> Trainer:
    given = {"max_epochs": 50, "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    given |= {"enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": folder}
    return Trainer(callbacks=list(callbacks), **(given | chosen))


def test_fitting_stops_with_the_run_and_loggers_have_its_rounds(tmp_path):
    logger = CSVLogger(tmp_path / "logs")
    callback = alone(tmp_path / "run", terms())
    fitted = trainer(tmp_path, callback, logger=logger)
    fitted.fit(Line(), data())
    assert fitted.global_step == 12
    assert callback.peer is None
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], float(row["swarm/round"])) for row in rows] == [("3", 1), ("6", 2), ("9", 3), ("12", 4)]


def test_batches_that_are_accumulated_are_one_inner_step(tmp_path):
    fitted = trainer(tmp_path, alone(tmp_path / "run", terms()), accumulate_grad_batches=2)
    fitted.fit(Line(), data())
    assert fitted.global_step == 12


def test_fitting_resumes_where_its_peer_was(tmp_path):
    def fit(callback: DecentralCallback, stop: int, ckpt_path: Path | None) -> Line:
        saves = ModelCheckpoint(tmp_path / "lightning", filename="{step}", every_n_train_steps=5, save_top_k=-1)
        chosen = {"enable_checkpointing": True}
        fitted = trainer(tmp_path, callback, saves, AtStep(stop, lambda: callback.peer.leave()), **chosen)
        module = Line()
        fitted.fit(module, data(), ckpt_path=ckpt_path)
        return module

    whole = fit(alone(tmp_path / "whole", terms()), 99, None).state_dict()
    fit(alone(tmp_path / "run", terms()), 4, None)  # leaves at 5, after the checkpoints of both
    resumed = fit(alone(tmp_path / "run", terms()), 99, tmp_path / "lightning" / "step=5.ckpt").state_dict()
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    with pytest.raises(ConfigError, match="after round 1 of this run"):
        fit(alone(tmp_path / "elsewhere", terms()), 99, tmp_path / "lightning" / "step=5.ckpt")


def test_an_error_while_fitting_ends_the_peer(tmp_path):
    def fail() -> None:
        raise ValueError("no more data")

    callback = alone(tmp_path / "run", terms())
    with pytest.raises(ValueError, match="no more data"):
        trainer(tmp_path, callback, AtStep(4, fail)).fit(Line(), data())
    assert callback.peer is None


def test_without_lightning_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.delitem(sys.modules, "decentral.integrations.lightning")
    with pytest.raises(ConfigError, match=r"pip install 'decentral\[lightning\]'"):
        importlib.import_module("decentral.integrations.lightning")


def test_a_method_that_changes_gradients_is_refused_in_automatic_optimization(tmp_path):
    with pytest.raises(ConfigError, match="closure"):
        trainer(tmp_path, alone(tmp_path / "run", terms(preset="scaffold"))).fit(Line(), data())
