"""Images in a swarm: a small convolutional network with BatchNorm learns the digits of scikit-learn (pip install it).

    python examples/images.py
    decentral join INVITE --script examples/images.py -- --seed 1

Every peer has all the digits and draws its own part of them; BatchNorm's means and variances are averaged in each
round with the rest, and the accuracy is that of the model that all peers end with.
"""

from __future__ import annotations

import argparse
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import decentral
from decentral import Manifest, preset_manifest

HELD_OUT = 300  # digits that nobody trains on


def terms(rounds: int) -> Manifest:
    """What all peers agree on: 20 steps of each between two rounds, everything in 8 bits."""
    inner = {"steps": 20, "learning_rate": 3e-3, "weight_decay": 0.01}
    return preset_manifest("diloco", run={"name": "images", "rounds": rounds}, model={"task": "custom"}, inner=inner)


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Images (N, 1, 8, 8) in [0, 1] and labels (N,): to train on, and held out."""
    images, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(images).float().reshape(-1, 1, 8, 8) / 16
    y = torch.from_numpy(labels).long()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))  # the same on all peers
    held, train = order[:HELD_OUT], order[HELD_OUT:]
    return TensorDataset(x[train], y[train]), TensorDataset(x[held], y[held])


def network() -> nn.Module:
    """4,954 parameters, and the buffers of two BatchNorms."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
    )


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Share of digits that are told right."""
    model.eval()
    with torch.no_grad():
        images, labels = data.tensors
        right = (model(images).argmax(dim=1) == labels).float().mean().item()
    model.train()
    return right


def main() -> None:
    """Train until the run is over."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0, help="of this peer's dropout and the like")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", help="run directory")
    chosen = parser.parse_args()

    torch.manual_seed(chosen.seed)  # the first peer's weights are the run's
    train, held_out = digits()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    with decentral.join(terms(chosen.rounds), model, optimizer, out=chosen.out) as peer:
        print(f"decentral join {peer.invite} --script {sys.argv[0]}", flush=True)
        while not peer.done:
            for images, labels in DataLoader(train, batch_size=32, sampler=peer.shard(train, batch_size=32)):
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                peer.log(loss=loss)
                if peer.done:
                    break
    print(f"{accuracy(model, held_out):.1%} of {HELD_OUT} held-out digits are told right")


if __name__ == "__main__":
    main()
