"""A run whose compressor and outer method are of the package beside this file.

    pip install ./examples/own_package
    python examples/own_package/train.py
    decentral join INVITE --script examples/own_package/train.py -- --seed 1

``decentral compressors`` and ``decentral optimizers`` list both, and any manifest may name them.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import nn

import decentral
from decentral import Manifest, preset_manifest


def terms(rounds: int) -> Manifest:
    """What all peers agree on: frames of everybody to everybody, four bits a value, what was not sent is owed."""
    return preset_manifest(
        "diloco",
        run={"name": "own-methods", "rounds": rounds},
        model={"task": "custom"},
        inner={"steps": 10, "learning_rate": 0.01, "weight_decay": 0.0},
        outer={"method": "outer_lion", "learning_rate": 0.02},
        compressor={"chain": "coarse(levels=7)", "feedback": "ef(beta=0.95)"},
        exchange={"kind": "gather"},
    )


def main() -> None:
    """Train until the run is over."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0, help="of this peer's data")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", help="run directory")
    chosen = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    random = torch.Generator().manual_seed(chosen.seed)
    with decentral.join(terms(chosen.rounds), model, optimizer, out=chosen.out) as peer:
        print(f"decentral join {peer.invite} --script {sys.argv[0]}", flush=True)
        while not peer.done:
            inputs = torch.randn(32, 8, generator=random)
            loss = nn.functional.mse_loss(model(inputs), inputs.prod(dim=1, keepdim=True).tanh())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            peer.log(loss=loss)


if __name__ == "__main__":
    main()
