"""Small problems of the kinds that people bring to ``--task custom``: each builds one peer's training.

    build = problem("gpt", width=64)      # of peer 0, 1, ...: model, optimizer, inner step, held-out loss

Peers draw their batches from the same text or the same images, each by its own generator, but for those of "uneven".
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from decentral.trial.own_model import Build

__all__ = ["PROBLEMS", "problem"]

CONTEXT = 64  # bytes
WARM_UP = 20  # inner steps
CLIP = 1.0
TEXT = 300_000  # bytes of the standard library's source


@cache
def _text() -> np.ndarray:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return np.frombuffer(b"".join(file.read_bytes() for file in files)[:TEXT], np.uint8)


def _windows(text: np.ndarray, generator: np.random.Generator, count: int) -> Tensor:
    starts = generator.integers(0, len(text) - CONTEXT - 1, count)
    return torch.stack([torch.from_numpy(text[at : at + CONTEXT + 1].astype(np.int64)) for at in starts])


# ---- models ----


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        parts = [one.unflatten(-1, (4, -1)).transpose(1, 2) for one in self.attention(self.before(x)).chunk(3, -1)]
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.between(x))


class _GPT(nn.Module):
    def __init__(self, width: int, layers: int = 2) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks, self.norm = nn.Sequential(*[_Block(width) for _ in range(layers)]), nn.LayerNorm(width)
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, bytes_BT: Tensor) -> Tensor:
        x = self.token(bytes_BT) + self.place.weight[: bytes_BT.shape[1]]
        return self.norm(self.blocks(x)) @ self.token.weight.T


class _LSTM(nn.Module):
    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.token, self.lstm = nn.Embedding(256, width), nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, bytes_BT: Tensor) -> Tensor:
        return self.head(self.lstm(self.token(bytes_BT))[0])


class _Adapted(nn.Module):
    """A linear layer that is frozen, with a low-rank addition that is not."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * base.in_features**-0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * (x @ self.down.T) @ self.up.T


# ---- problems on text ----


def _on_text(make: Callable[[], nn.Module], peer: int, batch: int = 8, rate: float = 1e-3) -> tuple:
    text, generator = _text(), np.random.default_rng(peer)
    cut = int(0.9 * len(text))
    torch.manual_seed(0)
    model = make()

    def loss_of(windows: Tensor) -> Tensor:
        return functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())

    held_out = _windows(text[cut:], np.random.default_rng(7), 256)
    return _trained(
        model, lambda: loss_of(_windows(text[:cut], generator, batch)), lambda: loss_of(held_out).item(), rate
    )


def _trained(
    model: nn.Module, loss: Callable[[], Tensor], evaluate: Callable[[], float], rate: float, decay: float = 0.1
) -> tuple:
    held = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(held, rate, betas=(0.9, 0.95), weight_decay=decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))

    def step() -> Tensor:
        found = loss()
        found.backward()
        nn.utils.clip_grad_norm_(held, CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return found.detach()

    return model, optimizer, step, evaluate


def _gpt(peer: int, width: int = 64, layers: int = 2) -> tuple:
    return _on_text(lambda: _GPT(width, layers), peer)


def _lstm(peer: int) -> tuple:
    return _on_text(_LSTM, peer, rate=2e-3)


def _lora(peer: int) -> tuple:
    return _on_text(_adapted_gpt, peer, rate=2e-3)


def _adapted_gpt() -> nn.Module:
    """The small GPT after 500 steps on other text, frozen, with adapters at every linear layer of its blocks."""
    model = _GPT(64)
    model.load_state_dict(_pretrained())
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for block in model.blocks:
        for name in ("attention", "out"):
            setattr(block, name, _Adapted(getattr(block, name)))
        block.mlp[0], block.mlp[2] = _Adapted(block.mlp[0]), _Adapted(block.mlp[2])
    return model


@cache
def _pretrained() -> dict[str, Tensor]:
    with torch.random.fork_rng():
        model, _, step, _ = _gpt(1000)
        for _ in range(500):
            step()
    return model.state_dict()


# ---- problems on scikit-learn's digits ----


@cache
def _digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    image, label = torch.from_numpy(images[order]).float() / 16, torch.from_numpy(labels[order]).long()
    return image[360:], label[360:], image[:360], label[:360]


def _on_digits(make: Callable[[], nn.Module], peer: int, rate: float, uneven: int = 0) -> tuple:
    image, label, held_image, held_label = _digits()
    generator = np.random.default_rng(peer)
    if uneven:  # each peer has most of some of the digits, and a tenth of the others
        mine = {(peer * (10 // uneven) + n) % 10 for n in range(10 // uneven)}
        keep = [int(one) in mine or generator.random() < 0.1 for one in label]
        image, label = image[keep], label[keep]
    torch.manual_seed(0)
    model = make()

    def loss() -> Tensor:
        at = torch.from_numpy(generator.integers(0, len(label), 16))
        return functional.cross_entropy(model(image[at]), label[at])

    def evaluate() -> float:
        model.eval()
        return functional.cross_entropy(model(held_image), held_label).item()

    return _trained(model, loss, evaluate, rate, decay=0.01)


def _conv(peer: int) -> tuple:
    def make() -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 10),
        )  # fmt: skip

    return _on_digits(make, peer, 1e-3)


def _mlp(peer: int, peers: int = 2, width: int = 128) -> tuple:
    return _on_digits(
        lambda: nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        ),
        peer, 1e-3, uneven=peers,
    )  # fmt: skip


PROBLEMS: dict[str, Callable[..., tuple]] = {
    "gpt": _gpt,
    "gpt-0.05M": partial(_gpt, width=36),
    "gpt-0.6M": partial(_gpt, width=128, layers=3),
    "gpt-2M": partial(_gpt, width=208, layers=4),
    "lora": _lora,
    "lstm": _lstm,
    "conv": _conv,
    "uneven": _mlp,
}


def problem(name: str, **sizes: int) -> Build:
    """How one peer's training of this problem is built."""
    return partial(PROBLEMS[name], **sizes)
