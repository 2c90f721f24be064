"""Lightning's Trainer in a swarm: copy it, put your module and your data in. pip install 'decentral[lightning]'

    python examples/fit_lightning.py
    decentral join INVITE --script examples/fit_lightning.py -- --seed 1

The line for the others is on the first peer's screen. devices=2 and strategy="ddp" make one peer of two processes.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from decentral import Manifest, preset_manifest
from decentral.integrations.lightning import DecentralCallback


def terms(rounds: int) -> Manifest:
    """What all peers agree on; in a file of its own once it is: decentral init run.toml --task custom."""
    inner = {"steps": 10, "learning_rate": 1e-2, "weight_decay": 0.0}
    return preset_manifest("diloco", run={"name": "fit", "rounds": rounds}, model={"task": "custom"}, inner=inner)


class Curve(LightningModule):
    """A curve, learnt from points on it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Squared distance."""
        inputs, wanted = batch
        loss = nn.functional.mse_loss(self.net(inputs), wanted)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As the terms say: they are compared."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.0)


def points(seed: int) -> DataLoader[Any]:
    """This peer's own data: a piece of the curve, which others have the rest of."""
    inputs = seed % 4 - 2 + torch.rand(640, 1, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(inputs, torch.sin(3 * inputs)), batch_size=32, shuffle=True)


def main() -> None:
    """Train until the run is over."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0, help="of this peer's data: another one on every machine")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", default="decentral-fit", help="the peer's run directory")
    chosen = parser.parse_args()

    torch.manual_seed(0)  # the first peer's model is the run's; the others only need its shapes
    swarm = DecentralCallback(terms(chosen.rounds), out=chosen.out)
    trainer = Trainer(
        max_epochs=-1,  # the run says when it is over
        callbacks=[swarm],
        default_root_dir=f"{chosen.out}/lightning",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Curve(), points(chosen.seed))


if __name__ == "__main__":
    main()
