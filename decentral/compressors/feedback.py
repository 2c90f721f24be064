"""Error feedback: what a compressor drops is owed, and is sent later.

m = beta * debt + tensor ; send compress(m) ; debt = m - decompress(compress(m)).

Pure: the caller books the debt only once a commit names the frame. Booked earlier, a lost round would be counted
twice or not at all; so an aborted round simply forgets what this returned, and nothing is lost.

Source: Seide et al., "1-bit stochastic gradient descent", 2014; Stich et al., "Sparsified SGD with Memory", 2018,
arXiv:1809.07599; the decay beta as in Sarfi et al., "SparseLoCo", 2025, arXiv:2508.15706.
"""

from torch import Tensor

from decentral.compressors.base import Compressor, Payload, accumulate
from decentral.errors import ConfigError

__all__ = ["compress_with_debt"]


def compress_with_debt(
    compressor: Compressor, tensor: Tensor, debt: Tensor | None, beta: float
) -> tuple[Payload, Tensor]:
    """Compress a tensor together with what is still owed; ``None`` is a debt of zero.

    Returns the payload and the debt after sending it, both new; ``tensor`` and ``debt`` are untouched.
    """
    if not 0 <= beta <= 1:
        raise ConfigError(f"compress_with_debt(beta={beta}): the debt's decay must be in [0, 1]; 0.95 is usual")
    if debt is not None and debt.shape != tensor.shape:
        raise ConfigError(
            f"compress_with_debt: debt {tuple(debt.shape)} and tensor {tuple(tensor.shape)} differ in shape"
        )
    owed = tensor.detach().clone() if debt is None else (debt * beta).add_(tensor.detach())
    payload = compressor.compress(owed)
    accumulate(compressor, owed, payload, -1.0)
    return payload, owed
