"""scikit-learn's digits, 1,797 images of 8 x 8, on uneven shards: the smallest task on which peers can disagree.

The model has one hidden layer of relu. Of each digit every peer has a share drawn from Dirichlet(alpha), as in the
attacks' experiments: at 0.1 most peers miss some digits, at 100 all have about the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from decentral.errors import ConfigError
from decentral.lab.work.base import OneByOne, Trained
from decentral.manifest import Manifest

__all__ = ["Digits"]

# Shape suffixes: D = digits of a set, X = pixels.

_PIXELS, _LABELS, _HELD_OUT = 64, 10, 360
_FEWEST: Final = 8  # digits of a peer; shards are drawn again until all have as many


@dataclass(frozen=True, slots=True)
class _Split:
    image_DX: Tensor
    label_D: Tensor
    held_image_DX: Tensor
    held_label_D: Tensor
    shards: tuple[Tensor, ...]  # places in the training set, of each rank


class Digits:
    """See Work. The split, the shards and the batches follow from the run's seed."""

    def __init__(self, manifest: Manifest, peers: int, alpha: float) -> None:
        self._manifest = manifest
        self._split = _split(peers, alpha, manifest.run.seed)

    def model(self) -> nn.Module:
        """See Work: weights uniform within 1 / sqrt(inputs), biases zero."""
        hidden, generator = self._manifest.model.hidden, torch.Generator().manual_seed(self._manifest.run.seed)
        made = nn.Sequential(nn.Linear(_PIXELS, hidden), nn.ReLU(), nn.Linear(hidden, _LABELS))
        with torch.no_grad():
            for parameter in made.parameters():
                bound = parameter.shape[1] ** -0.5 if parameter.ndim == 2 else 0.0
                parameter.uniform_(-bound, bound, generator=generator)
        return made

    @property
    def tokens_of_step(self) -> int:
        """See Work: examples."""
        return self._manifest.data.batch_size

    def loss(self, module: nn.Module, rank: int, step: int) -> Tensor:
        """See Work."""
        shard = self._split.shards[rank]
        random = np.random.default_rng((self._manifest.run.seed, rank, step))
        place = shard[torch.from_numpy(random.integers(len(shard), size=self._manifest.data.batch_size))]
        return functional.cross_entropy(module(self._split.image_DX[place]), self._split.label_D[place])

    @torch.no_grad()
    def held_out(self, module: nn.Module) -> float:
        """See Work; in nats per digit."""
        logits = module(self._split.held_image_DX)
        return float(functional.cross_entropy(logits.double(), self._split.held_label_D))

    def trained(self, modules: Sequence[nn.Module]) -> Trained:
        """See Work."""
        return OneByOne(self, modules)


def _split(peers: int, alpha: float, seed: int) -> _Split:
    image_DX, label_D = _load()
    random = np.random.default_rng(seed)
    order = random.permutation(len(label_D))
    held, train = order[:_HELD_OUT], order[_HELD_OUT:]
    shards = _shards(label_D[train], peers, alpha, random)
    images, labels = torch.from_numpy(image_DX).float() / 16, torch.from_numpy(label_D).long()
    return _Split(images[train], labels[train], images[held], labels[held], shards)


def _load() -> tuple[np.ndarray, np.ndarray]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigError(
            "task digits needs scikit-learn, which has them; pip install 'decentral[lab]', or take another task"
        ) from error
    images, labels = load_digits(return_X_y=True)
    return images, labels


def _shards(label_D: np.ndarray, peers: int, alpha: float, random: np.random.Generator) -> tuple[Tensor, ...]:
    """Places of each rank, at least a few: drawn again until all have them."""
    if peers * _FEWEST > len(label_D):
        raise ConfigError(f"{peers} peers share {len(label_D)} digits; use {len(label_D) // _FEWEST} peers or fewer")
    for _ in range(1000):
        drawn = _drawn(label_D, peers, alpha, random)
        if min(map(len, drawn)) >= _FEWEST:
            return tuple(torch.from_numpy(one) for one in drawn)
    raise ConfigError(f"alpha = {alpha:g} leaves some of {peers} peers without digits; raise it, or have fewer peers")


def _drawn(label_D: np.ndarray, peers: int, alpha: float, random: np.random.Generator) -> list[np.ndarray]:
    found: list[list[np.ndarray]] = [[] for _ in range(peers)]
    for label in range(_LABELS):
        places = random.permutation(np.flatnonzero(label_D == label))
        cuts = (np.cumsum(random.dirichlet([alpha] * peers))[:-1] * len(places)).astype(int)
        for mine, part in zip(found, np.split(places, cuts), strict=True):
            mine.append(part)
    return [np.concatenate(parts) for parts in found]
