"""Ten peers that learn scikit-learn's digits from uneven shards: all trained at once, one row of parameters each.

The model is 64-64-10 with relu. It has two matrices and no biases: pixel 0, blank in every digit, is 1 instead.
"""
# Shape suffixes: N = parameters, flat; P = peers, B = digits of a batch, X = pixels, S = of a shard, D = of a set.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

PIXELS, HIDDEN, LABELS = 64, 64, 10
SHAPES = {"hidden": (PIXELS, HIDDEN), "output": (HIDDEN, LABELS)}
NUMEL = sum(rows * columns for rows, columns in SHAPES.values())
TEST = 360  # of 1,797


@dataclass(frozen=True)
class Digits:
    """A split of the set, and who has which of it."""

    image_DX: Tensor
    label_D: Tensor
    test_image_DX: Tensor
    test_label_D: Tensor
    shard_PS: Tensor  # places in the training set, each row filled up by repeating it
    size_P: Tensor

    @classmethod
    def split(cls, num_peers: int, alpha: float, seed: int, fewest: int = 16) -> Digits:
        """Of each digit every peer has a share drawn from Dirichlet(alpha); drawn again until all have ``fewest``."""
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]

        image_DX, label_D = load_digits(return_X_y=True)
        random = np.random.default_rng(seed)
        order = random.permutation(len(label_D))
        test, train = order[:TEST], order[TEST:]
        shards = _shards(label_D[train], num_peers, alpha, random)
        while min(map(len, shards)) < fewest:
            shards = _shards(label_D[train], num_peers, alpha, random)
        longest = max(map(len, shards))
        images, labels = torch.from_numpy(image_DX).float() / 16, torch.from_numpy(label_D).long()
        images[:, 0] = 1.0
        return cls(
            images[train], labels[train], images[test], labels[test],
            torch.from_numpy(np.stack([np.resize(shard, longest) for shard in shards])),
            torch.tensor([len(shard) for shard in shards]),
        )  # fmt: skip

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Images (P, B, X) and labels (P, B), each peer's drawn from its shard with repetition."""
        drawn_PB = torch.rand((len(self.size_P), size), generator=generator) * self.size_P[:, None]
        place_PB = self.shard_PS.gather(1, drawn_PB.long())
        return self.image_DX[place_PB], self.label_D[place_PB]

    def judge(self, flat_N: Tensor) -> tuple[float, float]:
        """Loss and accuracy of a model on the digits that nobody trains on."""
        logit_BL = logits(flat_N[None], self.test_image_DX[None])[0]
        right = (logit_BL.nan_to_num().argmax(1) == self.test_label_D).float().mean()
        return float(functional.cross_entropy(logit_BL, self.test_label_D)), float(right)


class Trainers:
    """All peers' inner optimizers: AdamW by elements, so that one over all rows is one for each; clipped by rows."""

    def __init__(self, num_peers: int, learning_rate: float) -> None:
        self.live_PN = torch.zeros((num_peers, NUMEL), requires_grad=True)
        self.optimizer = torch.optim.AdamW([self.live_PN], lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)

    def train(self, anchor_N: Tensor, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """The local parameters (P, N) after these steps from the anchor."""
        with torch.no_grad():
            self.live_PN.copy_(anchor_N.expand_as(self.live_PN))
        for image_PBX, label_PB in batches:
            logit_PBL = logits(self.live_PN, image_PBX)
            loss = functional.cross_entropy(logit_PBL.flatten(0, 1), label_PB.flatten(), reduction="sum")
            self.optimizer.zero_grad()
            (loss / label_PB.shape[1]).backward()
            assert self.live_PN.grad is not None
            length_P1 = torch.linalg.vector_norm(self.live_PN.grad, dim=1, keepdim=True)
            self.live_PN.grad /= length_P1.clamp(min=1.0)
            self.optimizer.step()
        return self.live_PN.detach().clone()


def first_model(seed: int) -> Tensor:
    """Where all start (N,): weights uniform within 1 / sqrt(inputs), as torch.nn.Linear's."""
    generator = torch.Generator().manual_seed(seed)
    parts = [(torch.rand(shape, generator=generator) * 2 - 1) / shape[0] ** 0.5 for shape in SHAPES.values()]
    return torch.cat([part.flatten() for part in parts])


def logits(flat_PN: Tensor, image_PBX: Tensor) -> Tensor:
    """Of one model for each row (P, B, labels)."""
    hidden_PN, output_PN = flat_PN.split([PIXELS * HIDDEN, HIDDEN * LABELS], dim=1)
    value_PBH = functional.relu(image_PBX @ hidden_PN.view(-1, *SHAPES["hidden"]))
    return value_PBH @ output_PN.view(-1, *SHAPES["output"])


def _shards(label_D: np.ndarray, num_peers: int, alpha: float, random: np.random.Generator) -> list[np.ndarray]:
    found: list[list[np.ndarray]] = [[] for _ in range(num_peers)]
    for label in range(LABELS):
        places = random.permutation(np.flatnonzero(label_D == label))
        cuts = (np.cumsum(random.dirichlet([alpha] * num_peers))[:-1] * len(places)).astype(int)
        for mine, part in zip(found, np.split(places, cuts), strict=True):
            mine.append(part)
    return [np.concatenate(parts) for parts in found]
