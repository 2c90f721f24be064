"""A training loop of one's own in a swarm: copy it, put your model and your data in.

The first peer starts it, and prints the line for everybody else, who has a copy of the script:

    python examples/own_loop.py
    decentral join INVITE --script examples/own_loop.py -- --seed 1

There ``decentral.join`` takes the invite and the options of that line instead of what stands here.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import nn

import decentral
from decentral import Manifest, preset_manifest


def terms(rounds: int) -> Manifest:
    """What all peers agree on; in a file of its own once it is: decentral init run.toml."""
    run = {"name": "own-loop", "rounds": rounds}
    inner = {"steps": 10, "learning_rate": 1e-3, "weight_decay": 0.01}  # as the optimizer below: they are compared
    return preset_manifest("diloco", run=run, model={"task": "custom"}, inner=inner)


def batches(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This peer's own data: an epoch of points on a piece of a curve, which others have the rest of."""
    generator = torch.Generator().manual_seed(seed)
    left = seed % 4 - 2.0
    points = [left + torch.rand(32, 1, generator=generator) for _ in range(50)]
    return [(x, torch.sin(3 * x)) for x in points]


def main() -> None:
    """Train until the run is over: that is the run's to say, and may take many epochs or a part of one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0, help="of this peer's data: another one on every machine")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--out", help="run directory")
    chosen = parser.parse_args()

    torch.manual_seed(0)  # the first peer's model is the run's; the others only need its shapes
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    data = batches(chosen.seed)
    print(f"training on the points of seed {chosen.seed}")
    with decentral.join(terms(chosen.rounds), model, optimizer, out=chosen.out) as peer:
        print(f"decentral join {peer.invite} --script {sys.argv[0]}", flush=True)
        while not peer.done:
            for inputs, wanted in data:
                loss = nn.functional.mse_loss(model(inputs), wanted)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                peer.log(loss=loss)
                if peer.done:
                    break


if __name__ == "__main__":
    main()
