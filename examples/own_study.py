"""A model, a text and an outer method of one's own beside DiLoCo, three seeds: a cell of a notebook, or a script."""

from dataclasses import dataclass

import torch
from torch import nn

from decentral.lab import study
from decentral.optimizers import OuterMethod, key, rate

TEXT = torch.tensor(list("".join(f"{n} and {n + 1} are {2 * n + 1}; " for n in range(2000)).encode()))


@dataclass(frozen=True, slots=True)
class HeavyBall(OuterMethod):  # m <- mu*m + g ;  x <- x - lr*m
    lr: float = rate(0.4)
    momentum: float = key(0.6, "of the steps before", within="[0, 1)")

    def init(self, anchor):
        return {"m": torch.zeros_like(anchor)}

    def outer_step(self, anchor, received, state, info):
        m = state["m"] * self.momentum + received["change"]
        return anchor - m * self.lr, {"m": m}


class ThirdByte:
    def model(self):
        return nn.Sequential(nn.Embedding(128, 16), nn.Flatten(), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 128))

    def loss(self, model, rank, step, first=0, last=40_000, batch=32):
        at = torch.randint(first, last, (batch,))
        return nn.functional.cross_entropy(model(torch.stack([TEXT[at], TEXT[at + 1]], dim=1)), TEXT[at + 2])

    def held_out(self, model):
        return self.loss(model, 0, 0, first=40_000, last=len(TEXT) - 2, batch=1024)


table = study(
    [HeavyBall(), "diloco"], task=ThirdByte, rounds=8, inner={"steps": 5}, learning_rates=[0.02], seeds=[1, 2, 3]
).run()
print(table)
