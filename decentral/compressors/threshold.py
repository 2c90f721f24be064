"""Deep gradient compression: the largest entries of the whole tensor are sent, after a momentum for each entry."""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decentral.coding import Rising
from decentral.compressors.base import (
    About,
    Compressor,
    Decoded,
    PartSpec,
    Scattered,
    Selected,
    Shape,
    Shapes,
    Spelled,
    add_flat,
    check_input,
    compress_flat,
    require_rising,
)
from decentral.compressors.chain import SparsifierBase, joined
from decentral.compressors.feedback import DEBT, VELOCITY, Receiving, Sending, State, slot
from decentral.errors import ConfigError
from decentral.tensors.compiled import compiled

__all__ = ["DGC", "Threshold"]

# Shape suffixes: N = values, of a tensor or of the fragment, K = entries kept.

# ---- threshold: the largest entries of the whole tensor ----
#
# One threshold for all of it, guessed from a sample.
#
# Parts: indices int32 (1, K) into the flattened tensor, rising strictly; then the K kept values, float32 when used
# alone, as rows of 64 neighbours and a rest, so that a quantiser with scales per row follows the tensor's large and
# small regions. K = max(1, round(N * k / 4096)), so the shape alone bounds the message. An index takes 7.4 bits as a
# coded gap at k=64 when large entries lie evenly, less when they crowd, and at most log2(N). Where `topk` keeps k of
# every chunk, this follows the energy: a region that learns nothing sends nothing.
#
# On the processor, the magnitudes of a ``sample`` of the entries give a threshold that a few more than K should reach;
# one pass writes those down, and the exact K are taken from them. A guess that too few reach costs another pass. So
# ``sample`` changes the time, never the result: of equal magnitudes the first are kept. Other devices select with
# torch, and which of equal magnitudes is kept is their choice.
#
# The paper keeps 0.1 % (k = 4); the default is topk's 1.6 %.
#
# Source: Lin et al., "Deep Gradient Compression", 2017, arXiv:1712.01887 (a threshold from 0.1 to 1 % of the entries,
# then an exact selection among what reached it).

_OF = 4096  # k is counted among so many entries, as in topk
_ROW = 64  # kept values in a row
_LARGEST = 2**31 - 1  # what an int32 index can point into
_LEAST_SAMPLE = 4096


@dataclass(frozen=True, slots=True)
class Threshold(SparsifierBase):
    """Keep ``k`` in 4096 of all entries, wherever they are; ``sample`` of them are looked at for a guess."""

    name: ClassVar[str] = "threshold"
    about: ClassVar[About] = About(
        layout="indices, coded gaps (N*k/4096), values float32 (N*k/4096)",
        biased=True,
        source='Lin et al., "Deep Gradient Compression", 2017, arXiv:1712.01887',
        bound="|error|**2 <= (1 - K / N) * |x|**2, K = max(1, round(N * k / 4096))",
    )
    k: int = 64
    sample: float = 0.01

    def __post_init__(self) -> None:
        if not 1 <= self.k <= _OF:
            raise ConfigError(f"{self}: k of {_OF} entries are kept; want 1 <= k <= {_OF}")
        if not 0 < self.sample <= 1:
            raise ConfigError(f"{self}: sample is a share of the entries; want 0 < sample <= 1, 0.01 is usual")

    def index_layout(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Return indices (1, K), unless there is nothing to keep."""
        kept = self._num_kept(math.prod(shape))
        return (PartSpec("places", torch.int32, (1, kept), Rising(math.prod(shape))),) if kept else ()

    def value_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        """Return whole rows, then the rest."""
        whole, rest = divmod(self._num_kept(math.prod(shape)), _ROW)
        return tuple(rows for rows in ((whole, _ROW), (1, rest)) if rows[0] and rows[1])

    def select_one(self, tensor: Tensor) -> Selected:
        """Return rising indices, and the values there."""
        flat_N = check_input(tensor).flatten()
        if flat_N.numel() > _LARGEST:
            raise ConfigError(f"{self}: a tensor of {flat_N.numel()} values, an index reaches {_LARGEST}; use topk")
        if not flat_N.numel():
            return (), ()
        kept = self._num_kept(flat_N.numel())
        find = self._largest if tensor.device.type == "cpu" else largest_on_device
        index_K = find(flat_N, kept)
        rows = self.value_shapes(tuple(tensor.shape))
        values = torch.split_with_sizes(flat_N[index_K], [math.prod(row) for row in rows])
        return (index_K.int()[None],), tuple(value.view(row) for value, row in zip(values, rows, strict=True))

    def place_one(self, shape: Shape, index: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> Decoded:
        """Return the values at the kept places; PayloadError unless indices rise strictly inside the tensor."""
        (index_1K,) = index
        require_rising(index_1K, math.prod(shape), self)
        return Scattered(shape, index_1K[0].long(), joined(values))

    def _num_kept(self, numel: int) -> int:
        return max(1, round(numel * self.k / _OF)) if numel else 0

    def _largest(self, flat_N: Tensor, kept: int) -> Tensor:
        """Return rising places (K,) of the largest magnitudes."""
        index_K = np.empty(kept, dtype=np.int32)
        size_N = flat_N.contiguous().numpy().view(np.uint32)
        if not _reaching(size_N, self.guess(size_N, kept), index_K):
            _reaching(size_N, np.uint32(0), index_K)
        return torch.from_numpy(index_K)

    def guess(self, size_N: NDArray[np.uint32], kept: int) -> np.uint32:
        """Return the magnitude that a few more than K entries should reach, from every so many-th entry."""
        step = max(1, min(int(1 / self.sample), size_N.size // _LEAST_SAMPLE))
        seen = np.sort(size_N[::step] & np.uint32(0x7FFFFFFF))
        wanted = seen.size * kept / size_N.size
        rank = math.ceil(wanted + 3 * math.sqrt(wanted) + 1)  # short of K in one guess of 700, were the sample random
        return np.uint32(seen[seen.size - rank] if rank < seen.size else 0)


def largest_on_device(flat_N: Tensor, kept: int) -> Tensor:
    return flat_N.abs().topk(kept, sorted=False).indices.sort().values


@compiled
def _reaching(bits, least, index):  # type: ignore[no-untyped-def]  # numba reads the types of the arguments
    """Fill rising places of the largest magnitudes among those of at least ``least``; False when these are too few."""
    kept = index.size
    size, place = np.empty(2 * kept, dtype=np.uint32), np.empty(2 * kept, dtype=np.int32)
    n = 0
    for i in range(bits.size):
        s = bits[i] & np.uint32(0x7FFFFFFF)
        if s >= least:
            if n == size.size:  # what follows must be larger: of equal magnitudes the first are kept
                least = _best(size, place, n, kept) + np.uint32(1)
                n = kept
                if s < least:
                    continue
            size[n], place[n] = s, i
            n += 1
    if n < kept:
        return False
    _best(size, place, n, kept)
    index[:] = place[:kept]
    return True


@compiled
def _best(size, place, n, kept):  # type: ignore[no-untyped-def]
    """Move the ``kept`` largest of n to the front, in their order; returns the smallest of them."""
    threshold = np.partition(size[:n], n - kept)[n - kept]
    spare = kept
    for i in range(n):
        spare -= size[i] > threshold
    at = 0
    for i in range(n):
        tied = size[i] == threshold
        if size[i] > threshold or (tied and spare > 0):
            spare -= tied
            size[at], place[at] = size[i], place[i]
            at += 1
    return threshold


# ---- dgc: momentum before sparsification ----
#
# The momentum is forgotten where something was sent.
#
# u = momentum * u + g ; v = v + u ; send C(v) ; v = v - C(v), and u = 0 where C(v) is not 0.
#
# An entry that waits for its turn gathers velocity, not only gradients: with plain error feedback under a momentum
# optimizer it would arrive without the momentum it had earned. Where it was sent, the old velocity is masked, or stale
# directions would be applied again (momentum factor masking). The momentum is here, so the outer optimizer wants none.
# The paper zeroes v where something was sent; subtracting is the same for exact values, and keeps a quantiser's error.
# For compressors that send every entry all velocity is masked, and what is left is error feedback with beta = 1.
#
# The paper's clipping by N**-0.5 and its warm-up of the sparsity, 75 to 99.9 % over four epochs, are not done here.
#
# Source: Lin et al., "Deep Gradient Compression", 2017, arXiv:1712.01887.


@dataclass(frozen=True, slots=True)
class DGC(Spelled):
    """Momentum correction with factor masking."""

    name: ClassVar[str] = "dgc"
    about: ClassVar[About] = About(
        layout="sender: velocity, debt",
        biased=False,
        source='Lin et al., "Deep Gradient Compression", 2017, arXiv:1712.01887',
    )
    sender: ClassVar[tuple[str, ...]] = (VELOCITY, DEBT)
    receiver: ClassVar[tuple[str, ...]] = ()
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"{self}: momentum must be in [0, 1); 0.9 is usual, 0 is error feedback with beta=1")

    def send(self, compressor: Compressor, gradient_N: Tensor, state: State, shapes: Shapes) -> Sending:
        """Compress all velocity that was not sent yet."""
        velocity_N = slot(state, VELOCITY, gradient_N) * self.momentum + gradient_N.detach()
        owed_N = slot(state, DEBT, gradient_N) + velocity_N
        payloads = compress_flat(compressor, owed_N, shapes)
        sent_N = torch.zeros_like(owed_N)
        add_flat(compressor, sent_N, payloads)
        return Sending(payloads, {VELOCITY: velocity_N.masked_fill_(sent_N != 0, 0.0), DEBT: owed_N - sent_N})

    def receive(self, arrived_N: Tensor, state: State) -> Receiving:
        """Take the gradient for what arrived."""
        return Receiving(arrived_N, {})
