"""Eigenvectors of a small symmetric matrix, the same bits on every machine: those of a library are not.

Jacobi: turn every pair of axes, in one order, until what is off the diagonal is rounding. Sums, products, quotients and
square roots of float64 only.

Source: Golub, Van Loan, "Matrix Computations", 1996, 8.4.
"""
# Shape suffixes: K = rows, R = the largest eigenvalues.

from __future__ import annotations

import numpy as np

from decentral.optimizers.aggregation.sent import Floats
from decentral.tensors.compiled import compiled

__all__ = ["largest_eigenvectors"]

_SWEEPS = 30  # it takes 6 to 10; a bound
_ROUNDING = 1e-15  # of the largest value


def largest_eigenvectors(matrix_KK: Floats, count: int) -> Floats:
    """The eigenvectors of the ``count`` largest eigenvalues, one a row (R, K); fewer where the others are rounding."""
    diagonal_KK, vector_KK = matrix_KK.copy(), np.eye(len(matrix_KK))
    _turn(diagonal_KK, vector_KK)
    value_K = np.diagonal(diagonal_KK)
    order = np.argsort(-value_K, kind="stable")[:count]
    kept = [place for place in order.tolist() if value_K[place] > 1e-10 * value_K[order[0]]]
    return np.ascontiguousarray(vector_KK[:, kept].T)


@compiled
def _turn(matrix_KK, vector_KK):  # type: ignore[no-untyped-def]
    """Make the matrix diagonal, in place; the columns of ``vector_KK`` follow."""
    size, largest = matrix_KK.shape[0], 0.0
    for i in range(size):
        for j in range(size):
            largest = max(largest, abs(matrix_KK[i, j]))
    for _ in range(_SWEEPS):
        turned = False
        for p in range(size - 1):
            for q in range(p + 1, size):
                off = matrix_KK[p, q]
                if abs(off) <= _ROUNDING * largest:
                    continue
                turned = True
                slope = (matrix_KK[q, q] - matrix_KK[p, p]) / (2.0 * off)
                tangent = 1.0 / (abs(slope) + np.sqrt(slope * slope + 1.0))
                if slope < 0.0:
                    tangent = -tangent
                cosine = 1.0 / np.sqrt(tangent * tangent + 1.0)
                sine = tangent * cosine
                for k in range(size):
                    one, other = matrix_KK[k, p], matrix_KK[k, q]
                    matrix_KK[k, p], matrix_KK[k, q] = cosine * one - sine * other, sine * one + cosine * other
                for k in range(size):
                    one, other = matrix_KK[p, k], matrix_KK[q, k]
                    matrix_KK[p, k], matrix_KK[q, k] = cosine * one - sine * other, sine * one + cosine * other
                for k in range(size):
                    one, other = vector_KK[k, p], vector_KK[k, q]
                    vector_KK[k, p], vector_KK[k, q] = cosine * one - sine * other, sine * one + cosine * other
        if not turned:
            return
