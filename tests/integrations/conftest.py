"""Tiny random models of transformers, made of their configurations: nothing is fetched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from tests.integrations.tiny import Tokens

MakeTrainer = Callable[..., Trainer]


@pytest.fixture
def tiny_gpt2() -> GPT2LMHeadModel:
    """7,360 parameters."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2))


@pytest.fixture
def make_trainer(tmp_path: Path) -> MakeTrainer:
    """A Trainer of a callback: on the CPU, without a tracker or a progress bar."""

    def make(model: torch.nn.Module, *callbacks: TrainerCallback, seed: int = 0, **chosen: object) -> Trainer:
        given = {"output_dir": str(tmp_path / "trainer"), "per_device_train_batch_size": 4, "max_steps": 40}
        given |= {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 2}
        given |= {"learning_rate": 1e-2, "lr_scheduler_type": "constant", "seed": seed}
        data = Tokens(64, seed)
        args = TrainingArguments(**(given | chosen))
        return Trainer(model, args, train_dataset=data, eval_dataset=Tokens(8, 99), callbacks=list(callbacks))

    return make
