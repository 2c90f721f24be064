"""What a rule makes of given contributions, and what the dense equations of its paper make of them, in float64."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from decentral.optimizers import Aggregation
from decentral.optimizers.aggregation.base import Sent

Floats = NDArray[np.float64]


def aggregated(
    rule: Aggregation, sent_KN: Floats, weights: Sequence[float] | None = None, seed: bytes = b"round"
) -> Floats:
    """The result (N,), float64; float32 of a rule by coordinates."""
    weight_K = np.array([1.0] * len(sent_KN) if weights is None else weights)
    counted = weight_K > 0
    if rule.needs == "rows" and counted.sum() >= rule.least:
        return rule.combine(torch.from_numpy(sent_KN[counted]).float()).double().numpy()
    sent = Sent.of_gram(sent_KN @ sent_KN.T, weight_K.tolist(), seed)
    scale_K = np.array(rule.weigh(sent))
    return (weight_K * scale_K) @ sent_KN / weight_K.sum()


def gaussian(count: int, numel: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).normal(size=(count, numel))


def dense_centered_clip(sent_KN: Floats, tau: float | None, iterations: int, start_N: Floats) -> Floats:
    centre_N = start_N
    for _ in range(iterations):
        apart_KN = sent_KN - centre_N
        distance_K = np.linalg.norm(apart_KN, axis=1)
        radius = np.sort(distance_K)[(len(distance_K) - 1) // 2] if tau is None else tau
        scale_K = np.minimum(1.0, radius / np.maximum(distance_K, 1e-300))
        centre_N = centre_N + (apart_KN * scale_K[:, None]).mean(0)
    return centre_N


def dense_rfa(sent_KN: Floats, iterations: int, floor: float, start_N: Floats) -> Floats:
    centre_N, typical = start_N, np.sort(np.linalg.norm(sent_KN, axis=1))[(len(sent_KN) - 1) // 2]
    for _ in range(iterations):
        pull_K = 1 / np.maximum(np.linalg.norm(sent_KN - centre_N, axis=1), floor * typical)
        centre_N = (pull_K[:, None] * sent_KN).sum(0) / pull_K.sum()
    return centre_N


def dense_krum_scores(sent_KN: Floats, f: int) -> Floats:
    square_KK = ((sent_KN[:, None] - sent_KN[None]) ** 2).sum(-1)
    return np.sort(square_KK, axis=1)[:, 1 : len(sent_KN) - f - 1].sum(1)


def dense_mda(sent_KN: Floats, f: int) -> Floats:
    apart_KK = np.linalg.norm(sent_KN[:, None] - sent_KN[None], axis=-1)
    subsets = list(itertools.combinations(range(len(sent_KN)), len(sent_KN) - f))
    widths = [max(apart_KK[i, j] for i, j in itertools.combinations(subset, 2)) for subset in subsets]
    return sent_KN[list(subsets[int(np.argmin(widths))])].mean(0)


def dense_nnm(sent_KN: Floats, f: int) -> Floats:
    apart_KK = np.linalg.norm(sent_KN[:, None] - sent_KN[None], axis=-1)
    return np.stack([sent_KN[np.argsort(row, kind="stable")[: len(sent_KN) - f]].mean(0) for row in apart_KK])


def dense_arc(sent_KN: Floats, f: int) -> Floats:
    norm_K = np.linalg.norm(sent_KN, axis=1)
    limit = np.sort(norm_K)[::-1][2 * f * (len(norm_K) - f) // len(norm_K)]
    return sent_KN * np.minimum(1.0, limit / norm_K)[:, None]


def dense_caf(sent_KN: Floats, f: int) -> Floats:
    """With the exact main direction of the covariance."""
    count_K, least, best_N = np.ones(len(sent_KN)), np.inf, sent_KN.mean(0)
    while count_K.sum() > len(sent_KN) - 2 * f:
        mean_N = count_K @ sent_KN / count_K.sum()
        apart_KN = sent_KN - mean_N
        values, vectors = np.linalg.eigh((apart_KN.T * count_K) @ apart_KN / count_K.sum())
        if values[-1] < least:
            least, best_N = values[-1], mean_N
        stands_out_K = np.where(count_K > 0, (apart_KN @ vectors[:, -1]) ** 2, 0.0)
        count_K = count_K * (1 - stands_out_K / stands_out_K.max())
    return best_N


def dense_flag(sent_KN: Floats, rank: int, iterations: int) -> Floats:
    """With the singular vectors of a library."""
    norm_K = np.linalg.norm(sent_KN, axis=1)
    unit_KN, pull_K = sent_KN / norm_K[:, None], np.ones(len(sent_KN))
    for _ in range(iterations):
        _, _, direction_KN = np.linalg.svd(unit_KN * pull_K[:, None], full_matrices=False)
        shared_RN = direction_KN[:rank]
        pull_K = (1 - ((unit_KN @ shared_RN.T) ** 2).sum(1) + 1e-7) ** -0.25
    return np.sort(norm_K)[(len(norm_K) - 1) // 2] * (unit_KN.mean(0) @ shared_RN.T @ shared_RN)
