"""A Hugging Face Trainer in a swarm: copy it, put your model and your data in.

The first peer starts it; the line for everybody else, who has a copy of the script, is on its screen:

    python examples/trainer.py
    decentral join INVITE --script examples/trainer.py -- --seed 1

Whatever the Trainer can do it still does: evaluation, checkpoints, trackers, accelerate launch.
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from decentral import Manifest, preset_manifest
from decentral.integrations.transformers import DecentralCallback

LEARNING_RATE = 1e-2


def terms(rounds: int) -> Manifest:
    """What all peers agree on; in a file of its own once it is: decentral init run.toml --task custom."""
    run = {"name": "trainer", "rounds": rounds}
    inner = {"steps": 10, "learning_rate": LEARNING_RATE, "weight_decay": 0.0}  # as the Trainer's: they are compared
    return preset_manifest("diloco", run=run, model={"task": "custom"}, inner=inner)


class Counting(Dataset[dict[str, torch.Tensor]]):
    """This peer's own data: sequences that count upwards, some from here and some from there."""

    def __init__(self, count: int, seed: int) -> None:
        first = torch.randint(32, (count, 1), generator=torch.Generator().manual_seed(seed))
        self._rows = (first + torch.arange(16)) % 32

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


def main() -> None:
    """Train until the run is over."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0, help="of this peer's data: another one on every machine")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", default="decentral-trainer", help="the peer's run directory, and the Trainer's in it")
    chosen = parser.parse_args()

    torch.manual_seed(
        0
    )  # the first peer's model is the run's; yours is rather AutoModelForCausalLM.from_pretrained(...)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=16, **sizes))
    swarm = DecentralCallback(terms(chosen.rounds), out=chosen.out)
    args = TrainingArguments(
        output_dir=f"{chosen.out}/trainer",
        max_steps=10 * chosen.rounds,  # the schedule's length: the run ends by its own count
        per_device_train_batch_size=8,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        logging_steps=10,
        save_strategy="no",
        report_to="none",
    )
    data = Counting(512, chosen.seed)
    with swarm:
        Trainer(model, args, train_dataset=data, callbacks=[swarm]).train()
    model.save_pretrained(f"{chosen.out}/model")


if __name__ == "__main__":
    main()
