"""What a compressor is fit for, measured on the compressor itself, so that it holds for those of other packages too."""

import math

import torch

from decentral.compressors.base import Compressor

__all__ = ["bits_per_value", "needs_matrices", "relative_error"]

_SHAPE = (1024, 1024)  # as bits per value are told of


def bits_per_value(compressor: Compressor) -> float:
    """Bits that it takes of a matrix of a million values, each of them, before entropy coding: at most."""
    return 8 * sum(spec.nbytes for spec in compressor.layout(_SHAPE)) / math.prod(_SHAPE)


def needs_matrices(compressor: Compressor) -> bool:
    """Whether the same values take twice the bytes or more once they are a flat vector: low rank does, 256 times."""
    matrix, flat = (sum(spec.nbytes for spec in compressor.layout(shape)) for shape in (_SHAPE, (math.prod(_SHAPE),)))
    return flat >= 2 * matrix


def relative_error(compressor: Compressor) -> float:
    """The norm of what is lost of a Gaussian matrix over the norm of the matrix: 0 is lossless, 1 sends nothing."""
    matrix = torch.randn(_SHAPE, generator=torch.Generator().manual_seed(0))
    lost = matrix - compressor.decompress(compressor.compress(matrix))
    return float(lost.norm() / matrix.norm())
