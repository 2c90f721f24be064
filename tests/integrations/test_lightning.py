"""A Trainer of Lightning with a DecentralCallback, alone over a network in memory."""

from __future__ import annotations

import csv
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decentral.errors import ConfigError
from tests.integrations.tiny import run_ranks, terms

pytestmark = pytest.mark.filterwarnings("ignore")  # it warns of a loader with one worker, of its own checkpoints


@pytest.fixture(scope="module")
def fitting() -> Any:
    """tests/integrations/fitting.py, with Lightning: two to five seconds to import, so nearly all of this is long."""
    pytest.importorskip("lightning")
    return importlib.import_module("tests.integrations.fitting")


@pytest.mark.long
def test_fitting_stops_with_the_run_and_loggers_have_its_rounds(tmp_path, fitting):
    logger = fitting.CSVLogger(tmp_path / "logs")
    callback = fitting.alone(tmp_path / "run", terms())
    fitted = fitting.trainer(tmp_path, callback, logger=logger)
    fitted.fit(fitting.Line(), fitting.data())
    assert fitted.global_step == 12
    assert callback.peer is None
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], float(row["swarm/round"])) for row in rows] == [("3", 1), ("6", 2), ("9", 3), ("12", 4)]


@pytest.mark.long
def test_batches_that_are_accumulated_are_one_inner_step(tmp_path, fitting):
    callback = fitting.alone(tmp_path / "run", terms())
    told, returned, module = list[float](), list[float](), fitting.Line()
    plain = module.training_step

    def step(*given: Any) -> torch.Tensor:
        callback.peer.log = lambda loss: told.append(float(loss))
        returned.append(float(loss := plain(*given)))
        return loss

    module.training_step = step
    fitted = fitting.trainer(tmp_path, callback, accumulate_grad_batches=2)
    fitted.fit(module, fitting.data())
    assert fitted.global_step == 12
    assert told[:20] == pytest.approx(returned[:20]), "and not what Lightning has divided by the number of batches"


@pytest.mark.long
def test_fitting_resumes_where_its_peer_was(tmp_path, fitting):
    def fit(callback: Any, stop: int, ckpt_path: Path | None) -> Any:
        saves = fitting.ModelCheckpoint(tmp_path / "lightning", filename="{step}", every_n_train_steps=5, save_top_k=-1)
        leaves = fitting.AtStep(stop, lambda: callback.peer.leave())
        fitted = fitting.trainer(tmp_path, callback, saves, leaves, enable_checkpointing=True)
        module = fitting.Line()
        fitted.fit(module, fitting.data(), ckpt_path=ckpt_path)
        return module

    whole = fit(fitting.alone(tmp_path / "whole", terms()), 99, None).state_dict()
    fit(fitting.alone(tmp_path / "run", terms()), 4, None)  # leaves at 5, after the checkpoints of both
    resumed = fit(fitting.alone(tmp_path / "run", terms()), 99, tmp_path / "lightning" / "step=5.ckpt").state_dict()
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    with pytest.raises(ConfigError, match="after round 1 of this run"):
        fit(fitting.alone(tmp_path / "elsewhere", terms()), 99, tmp_path / "lightning" / "step=5.ckpt")


@pytest.mark.long
def test_an_error_while_fitting_ends_the_peer(tmp_path, fitting):
    def fail() -> None:
        raise ValueError("no more data")

    callback = fitting.alone(tmp_path / "run", terms())
    with pytest.raises(ValueError, match="no more data"):
        fitting.trainer(tmp_path, callback, fitting.AtStep(4, fail)).fit(fitting.Line(), fitting.data())
    assert callback.peer is None


@pytest.mark.long
def test_a_trainer_of_two_processes_is_one_peer(tmp_path):
    one, other = run_ranks(tmp_path, "-W", "ignore", "-m", "tests.integrations.fitting_ranks")
    assert one == other
    assert one[0] == 12


@pytest.mark.long
def test_a_strategy_that_shards_the_model_is_refused(fitting):
    from decentral.integrations.lightning import _check_whole

    with pytest.raises(ConfigError, match=r'does not leave the whole model with each process.*strategy="ddp"'):
        _check_whole(SimpleNamespace(strategy=object()))


def test_a_preset_founds_the_run(tmp_path, fitting):
    trainer = fitting.trainer(tmp_path, fitting.alone(tmp_path / "run", None, preset="diloco", rounds=2, steps=3))
    trainer.fit(fitting.Line(), fitting.data())
    assert trainer.global_step == 6


def test_without_lightning_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.delitem(sys.modules, "decentral.integrations.lightning", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'lightning>="):
        importlib.import_module("decentral.integrations.lightning")


@pytest.mark.long
def test_a_method_that_changes_gradients_is_refused_in_automatic_optimization(tmp_path, fitting):
    with pytest.raises(ConfigError, match="closure"):
        fitting.trainer(tmp_path, fitting.alone(tmp_path / "run", terms(preset="scaffold"))).fit(
            fitting.Line(), fitting.data()
        )
