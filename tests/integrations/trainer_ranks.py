"""One peer of two processes, by accelerate: a Trainer; each rank tells what it holds at the end."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from accelerate.utils import gather_object
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from decentral.integrations.transformers import DecentralCallback
from tests.integrations.tiny import NET, Tokens, Watched


def main(manifest: str, out: str) -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2))
    callback = DecentralCallback(manifest, out=out, **NET, alone=True)
    args = TrainingArguments(
        output_dir=f"{out}/trainer",
        max_steps=40,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=5,
        save_steps=5,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    drawn: list[int] = []
    trainer = Trainer(model, args, train_dataset=Watched(Tokens(64, 0), drawn), callbacks=[callback])
    trainer.train()
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    told = gather_object([(trainer.state.global_step, flat.double().sum().item(), trainer.args.world_size)])
    first_pass = gather_object([drawn[:32]])
    if trainer.is_world_process_zero():
        found = {"ranks": told, "first_pass": first_pass, "logs": trainer.state.log_history}
        Path(out, "ranks.json").write_text(json.dumps(found))
    trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # as tests/peer/two_ranks.py
