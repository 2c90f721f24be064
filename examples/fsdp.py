"""One peer of several GPUs, or of several processes: each holds a shard of the model. Copy it, put your model in.

    accelerate launch --num_processes 2 examples/fsdp.py --text my.txt
    accelerate launch --num_processes 4 examples/fsdp.py --text theirs.txt --run INVITE

Peers of one process take part as well: ``python examples/fsdp.py --text theirs.txt --run INVITE``. Without a GPU the
processes of a peer share the processor (``accelerate launch --cpu``).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: TID251 - our own linter's
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

import decentral
from decentral import Manifest, preset_manifest

LEARNING_RATE = 3e-3


def terms(rounds: int) -> Manifest:
    """What all peers agree on. Four fragments, of a block each and of the rest: one is synchronised every 5 steps."""
    inner = {"steps": 20, "learning_rate": LEARNING_RATE, "weight_decay": 0.0}
    tables = {"model": {"task": "custom"}, "inner": inner, "outer": {"fragments": 4}}
    return preset_manifest("streaming", run={"name": "fsdp", "rounds": rounds}, **tables)


class Windows(Dataset[Tensor]):
    """A text as bytes, 64 at a time."""

    def __init__(self, text: bytes) -> None:
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self._bytes) // 64

    def __getitem__(self, index: int) -> Tensor:
        return self._bytes[64 * index : 64 * (index + 1)]


def shard(model: LlamaForCausalLM) -> None:
    """Each block by itself, and the rest: whole only while it computes. Computing is in bfloat16, what is kept is not.

    ``accelerator.prepare(model, optimizer)`` does the same where accelerate is configured for it (fsdp_version: 2).
    """
    policy: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    for block in model.model.layers:
        fully_shard(block, **policy)
    fully_shard(model, **policy)


def main() -> None:
    """Train until the run is over."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", type=Path, required=True, help="what this peer trains on")
    parser.add_argument("--run", help="the invite of a run; without one this peer founds it")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", default="decentral-fsdp", help="run directory")
    chosen = parser.parse_args()

    accelerator = Accelerator()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=64, **sizes)).to(accelerator.device)
    if accelerator.num_processes > 1:
        shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.0)  # of what each process holds
    optimizer, data = accelerator.prepare(optimizer), Windows(chosen.text.read_bytes())
    run = chosen.run or terms(chosen.rounds)
    with decentral.join(run, model, optimizer, accelerator=accelerator, out=chosen.out) as peer:
        if accelerator.is_main_process:
            print(f"decentral join {peer.invite} --script {sys.argv[0]}", flush=True)
        size = 8 * accelerator.num_processes
        loader = accelerator.prepare(DataLoader(data, batch_size=8, sampler=peer.shard(data, batch_size=size)))
        while not peer.done:
            for token_BT in loader:
                loss = model(input_ids=token_BT, labels=token_BT).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                peer.log(loss=loss)
                if peer.done:  # on all processes in the same step
                    break
        if accelerator.is_main_process:
            print(f"round {peer.round}: decentral export {chosen.out} --to model", flush=True)
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
