"""Milliseconds of a processor that compiled loops take, beside torch and numpy doing the same.

    OMP_NUM_THREADS=1 python -m experiments.cost.kernels [--millions 30]

One thread, the best of a few runs, ours and theirs in turns. Theirs is the shortest that a reader of torch would write.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from decentral.coding import rans
from decentral.compressors import blocks, chunks, signmag2
from decentral.compressors.threshold import Threshold
from decentral.tensors import ops

Work = Callable[[], object]
SIDE = 1024  # columns of the matrix


def pairs(value_N: Tensor, other_N: Tensor, third_N: Tensor) -> Iterator[tuple[str, Work, Work]]:
    yield "difference and norm", lambda: ops.difference_and_norm(value_N, other_N), lambda: difference(value_N, other_N)
    rates = (0.7, 0.9)
    yield (
        "Nesterov step",
        lambda: ops.with_momentum(value_N, other_N, third_N, rates, nesterov=True),
        lambda: nesterov(value_N, other_N, third_N, *rates),
    )
    matrix = value_N.view(-1, SIDE)
    (region,) = chunks.regions(tuple(matrix.shape), 4096)
    yield (
        "top-k, 64 of 4096",
        lambda: chunks.largest(matrix, region, 64),
        lambda: chunks.largest_by_torch(chunks.cut(matrix, region), 64),
    )
    most = len(value_N) // 64
    yield (
        "threshold, 1 of 64 of all",
        lambda: Threshold()._largest(value_N, most),
        lambda: value_N.abs().topk(most, sorted=False).indices.sort().values,
    )
    row_RC = value_N.view(-1, 64)
    yield (
        "levels of two bits",
        lambda: signmag2.best_means(row_RC),
        lambda: signmag2._means_of_best_split(row_RC),
    )
    yield "quantise int8", lambda: blocks.quantise(value_N, 256, 127, 3e38), lambda: quantise(value_N)
    code_N, scale_B = blocks.quantise(value_N, 256, 127, 3e38)
    level_L = torch.arange(256, dtype=torch.float32) - 128
    yield (
        "decode int8",
        lambda: blocks.look_up(code_N, level_L, scale_B, 256),
        lambda: level_L[code_N.int()].view(-1, 256) * scale_B[:, None],
    )
    codes = code_N.numpy()
    yield "count symbols", lambda: rans.counts(codes), lambda: torch.bincount(code_N, minlength=256)


def difference(one_N: Tensor, other_N: Tensor) -> tuple[Tensor, Tensor]:
    change_N = one_N - other_N
    return change_N, torch.linalg.vector_norm(change_N, dtype=torch.float64)


def nesterov(anchor_N: Tensor, change_N: Tensor, momentum_N: Tensor, lr: float, mu: float) -> tuple[Tensor, Tensor]:
    momentum_N = mu * momentum_N + change_N
    return anchor_N - lr * (mu * momentum_N + change_N), momentum_N


def quantise(value_N: Tensor) -> tuple[Tensor, Tensor]:
    value_BL = value_N.view(-1, 256)
    scale_B = value_BL.abs().amax(1, keepdim=True) / 127
    return (torch.clamp(torch.round(value_BL / scale_B), -127, 127) + 128).to(torch.uint8), scale_B


def milliseconds(work: Work) -> float:
    began = time.process_time()
    work()
    return 1e3 * (time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    numel = asked.millions * (1 << 20)
    given = [torch.randn(numel, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    for name, ours, theirs in pairs(*given):
        ours()  # which compiles
        turns = [(milliseconds(ours), milliseconds(theirs)) for _ in range(asked.repeats)]
        least, other = min(one for one, _ in turns), min(one for _, one in turns)
        print(f"{name:26} {least:8.1f} {other:8.1f} {other / least:6.1f} x", flush=True)


if __name__ == "__main__":
    main()
