"""One peer of two processes: run by accelerate, it trains each run until it is done and tells what its ranks hold."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import decentral
from decentral.manifest import load_manifest
from decentral.parameters import digest
from decentral.training.inner import build_inner


class Net(nn.Module):
    """With a teacher that follows it, and a whole number that is each process's own between two rounds."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.layers, self.teacher = rank, nn.Linear(32, 32), nn.Linear(32, 32).requires_grad_(False)
        self.norm = nn.BatchNorm1d(32)
        self.register_buffer("pointer", torch.tensor(0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.layers.weight, 0.1 + 0.1 * self.rank)
        self.pointer += 1 + self.rank
        return self.norm(self.layers(inputs))


def main(*manifests: str) -> None:
    accelerator = Accelerator(cpu=True)
    for manifest in manifests:
        train(accelerator, manifest, manifest.removesuffix(".toml"))
    accelerator.end_training()


def train(accelerator: Accelerator, manifest: str, out: str) -> None:
    torch.manual_seed(accelerator.process_index)  # ranks begin apart: accelerate and the swarm bring them together
    model = Net(accelerator.process_index)
    (optimizer,) = build_inner(load_manifest(manifest).inner, model)
    model, optimizer = accelerator.prepare(model, optimizer)
    data = torch.Generator().manual_seed(accelerator.process_index)
    terms = load_manifest(manifest)
    if accelerator.process_index:  # a script that makes its terms itself draws another salt on every rank
        terms = terms.with_salt("another")
    settings = {"accelerator": accelerator, "listen": ("/ip4/127.0.0.1/tcp/0",), "moved": ["teacher"], "alone": True}
    with decentral.join(terms, model, optimizer, out=out, **settings) as peer:
        steps, drawn, told = 0, [], []
        peer.on_round(lambda ended: told.append((ended.round, ended.members, ended.bytes_sent > 0)))
        other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule = peer.schedule(other)
        rates = []
        items = TensorDataset(torch.arange(200))
        loader = accelerator.prepare(DataLoader(items, batch_size=4, sampler=peer.shard(items, batch_size=8)))
        for (batch,) in loader:
            if peer.done:
                break
            drawn += batch.tolist()
            inputs = torch.randn(8, 32, generator=data)
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            rates.append((peer.round, peer.progress, schedule.get_last_lr()[0]))
            if steps == 7:
                before = whole(accelerator.unwrap_model(model)).clone()
                with peer.evaluating():
                    held = accelerator.unwrap_model(model).state_dict()
                    del held["pointer"]  # each process's own between two rounds
                    rates.append(digest(torch.cat([one.detach().float().reshape(-1) for one in held.values()])).hex())
                rates.append(torch.equal(before, whole(accelerator.unwrap_model(model))))
        bare = accelerator.unwrap_model(model)
        found = {
            "ranks": gather_object([(digest(whole(bare)).hex(), steps)]),
            "parts": gather_object([drawn]),
            "seeds": gather_object([peer.seed]),
            "seen": gather_object([[told, rates]]),
            "alike": gather_object([(peer.round, peer.anchor_digest)]),
            "anchor": peer.anchor_digest,
        }
    if accelerator.is_main_process:
        found["live"] = digest(whole(bare)).hex()
        Path(out, "ranks.json").write_text(json.dumps(found))
    accelerator.wait_for_everyone()  # a rank that leaves first takes the store of the other with it


def whole(bare: nn.Module) -> torch.Tensor:
    """Parameters and buffers."""
    return torch.cat([tensor.detach().float().reshape(-1) for tensor in bare.state_dict().values()])


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # torch's threads of the ended process group abort an interpreter that goes down, now and then
