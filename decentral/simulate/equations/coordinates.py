"""Steps that treat coordinates apart: by size, by sign, by slice, or along directions that a seed stands for."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from decentral.simulate.equations.averaged import Averaged, Keys
from decentral.simulate.equations.directions import signs

__all__ = ["fedopt", "just_one_byte", "partial_updates", "signed"]


def fedopt(run: Sequence[Averaged], keys: Keys) -> Tensor:
    """Algorithm 2 of arXiv:2003.00295, with the sign of a descent direction."""
    moved_N = mean_N = torch.zeros_like(run[0].mean_N)
    square_N = torch.full_like(mean_N, keys["tau"] ** 2)
    for one in run:
        fresh_N, kept = one.mean_N**2, keys["beta2"]
        mean_N = keys["beta1"] * mean_N + (1 - keys["beta1"]) * one.mean_N
        square_N = {
            "adagrad": square_N + fresh_N,
            "adam": kept * square_N + (1 - kept) * fresh_N,
            "yogi": square_N - (1 - kept) * fresh_N * (square_N - fresh_N).sign(),
        }[keys["variant"]]
        moved_N = moved_N - keys["lr"] * mean_N / (square_N.sqrt() + keys["tau"])
    return moved_N


def signed(run: Sequence[Averaged], keys: Keys) -> Tensor:
    """The last line of arXiv:2411.19870: a step of one size by the sign of what was averaged, or by that itself."""
    means = [one.mean_N.sign() if keys["step"] == "sign" else one.mean_N for one in run]
    return -float(keys["lr"]) * torch.stack(means).sum(0)


def partial_updates(run: Sequence[Averaged], keys: Keys) -> Tensor:
    """Nesterov of each slice by itself, over the mean of its owners: arXiv:2509.22418."""
    slices, numel = keys["slices"], len(run[0].mean_N)
    moved_N, momentum_N = torch.zeros_like(run[0].mean_N), torch.zeros_like(run[0].mean_N)
    for one in run:
        said = [number for ref in one.contributors for (number,) in struct.iter_unpack("<H", ref.summary)]
        for number in set(said):
            place = slice(numel * number // slices, numel * (number + 1) // slices)
            change = one.mean_N[place] * (len(one.contributors) / said.count(number))
            momentum_N[place] = keys["momentum"] * momentum_N[place] + change
            moved_N[place] -= keys["lr"] * (change + keys["momentum"] * momentum_N[place])
    return moved_N


def just_one_byte(run: Sequence[Averaged], keys: Keys) -> Tensor:
    """arXiv:2306.10015 with signs for directions; of each summary seed, number, and a byte for each derivative."""
    moved_N = torch.zeros_like(run[0].mean_N)
    for one in run:
        told = [ref.summary for ref in one.contributors if len(ref.summary) > 12]
        for summary in told:
            seed, first = struct.unpack_from("<QI", summary)
            for place, byte in enumerate(summary[12:]):
                size = 2 ** (((byte & 127) - 64) / 8) if byte & 127 else 0.0
                rate = (-size if byte & 128 else size) / math.sqrt(sum(len(each) - 12 for each in told))
                moved_N = moved_N - keys["lr"] * rate * signs(seed, first + place, one.name, len(moved_N))
    return moved_N
