"""Keep k entries of every chunk at places that both sides draw: no index crosses the wire.

Parts: a nonce uint8 (8,), a fingerprint of the tensor, so that rounds differ and a repeated round does not; then the
kept values (C, k), float32 when used alone. With ``k=64, chunk=4096`` that is half a bit per value, and eight bytes per
tensor. Places come from ``seed``, nonce and chunk through an integer hash (`hash32`): equal on every device.
A chunk is a run of the flattened tensor; one of L values keeps max(1, round(L * k / chunk)). It is turned by a random
step and cut into k stretches that differ by at most one in length, and one entry of each is kept: every entry has the
same chance k / L, so E|C(x) - x|^2 = (1 - k/L) |x|^2, as with any k of L, and a draw costs k hashes and no sort.

Values are sent as they are, not times L/k: contracting and biased, for use with error feedback. The scaled variant is
unbiased, but its error is (L/k - 1) |x|^2: 63 |x|^2 at 64 of 4096, which error feedback would amplify.

The paper draws k of all entries anew; here a chunk has its k, and a draw follows from the tensor itself, so that an
aborted round repeats: equal tensors keep the same entries, and only a debt that changes moves on to others.

Source: Stich et al., "Sparsified SGD with Memory", 2018, arXiv:1809.07599 (rand-k); the stretches are Madow's ("On the
Theory of Systematic Sampling", 1944) with a draw in each.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.coding import Symbols
from decentral.compressors.base import About, Decoded, PartSpec, Scattered, Selected, Shape, check_input
from decentral.compressors.blocks import check_block
from decentral.compressors.chain import SparsifierBase, joined
from decentral.compressors.random import below, hash32, nonce_of
from decentral.errors import ConfigError

__all__ = ["RandK"]

# Shape suffixes: N = values, C = chunks, L = values per chunk, k = entries kept per chunk.

_NONCE_NBYTES = 8
_MASK = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class RandK(SparsifierBase):
    """Keep ``k`` of every ``chunk`` entries, drawn anew for every tensor."""

    name: ClassVar[str] = "randk"
    about: ClassVar[About] = About(
        layout="a nonce of 8 bytes, values float32 (N*k/chunk), no indices",
        biased=True,
        source='Stich et al., "Sparsified SGD with Memory", 2018, arXiv:1809.07599',
    )
    k: int = 64
    chunk: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        check_block(self, self.chunk)
        if not 1 <= self.k <= self.chunk:
            raise ConfigError(f"{self}: k entries of a chunk are kept; want 1 <= k <= {self.chunk}")
        if not 0 <= self.seed <= _MASK:
            raise ConfigError(f"{self}: a seed has 32 bits; want 0 <= seed <= {_MASK}")

    def index_layout(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Return the nonce, unless there is nothing to keep."""
        return (PartSpec("nonce", torch.uint8, (_NONCE_NBYTES,), Symbols(8)),) if math.prod(shape) else ()

    def value_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        """Return (C, k) of the whole chunks, then of the rest."""
        return tuple((count, self._num_kept(length)) for count, length in self._runs(shape))

    def select_one(self, tensor: Tensor) -> Selected:
        """Return the nonce, and the values at its places."""
        flat_N = check_input(tensor).flatten()
        if not flat_N.numel():
            return (), ()
        nonce = nonce_of(flat_N)
        return (nonce,), tuple(flat_N[place_Ck] for place_Ck in self._places(nonce, tuple(tensor.shape)))

    def place_one(self, shape: Shape, index: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> Decoded:
        """Return the values at the places of the nonce, which are distinct; any nonce is one."""
        (nonce,) = index
        return Scattered(shape, joined(self._places(nonce, shape)), joined(values))

    def _num_kept(self, length: int) -> int:
        return max(1, round(length * self.k / self.chunk))

    def _runs(self, shape: Shape) -> list[tuple[int, int]]:
        """Return (number of chunks, values in each): the whole ones, then the rest."""
        whole, rest = divmod(math.prod(shape), self.chunk)
        return [run for run in ((whole, self.chunk), (1, rest)) if run[0] and run[1]]

    def _places(self, nonce: Tensor, shape: Shape) -> list[Tensor]:
        """Return places (C, k) in the flattened tensor of every run of chunks, distinct."""
        found, chunk, start = [], 0, 0
        for count, length in self._runs(shape):
            first_C1 = torch.arange(count, device=nonce.device, dtype=torch.int64)[:, None]
            key_C1 = self._key(nonce, first_C1 + chunk)
            found.append(_draw(key_C1, length, self._num_kept(length)) + first_C1 * length + start)
            chunk, start = chunk + count, start + count * length
        return found

    def _key(self, nonce: Tensor, chunk_C1: Tensor) -> Tensor:
        """Return 32 bits for every chunk."""
        byte_8 = nonce.long()
        low, high = (sum((byte_8[at + i] << (8 * i) for i in range(1, 4)), byte_8[at]) for at in (0, 4))
        return hash32(hash32(hash32(low ^ self.seed) ^ high) ^ (chunk_C1 & _MASK))


def _draw(key_C1: Tensor, length: int, k: int) -> Tensor:
    """Return places (C, k) in [0, length), one in each of k stretches of a chunk that was turned."""
    stretch_k = torch.arange(k, device=key_C1.device, dtype=torch.int64)
    edge_k, next_k = stretch_k * length // k, (stretch_k + 1) * length // k
    # Keys of neighbouring numbers are unrelated, so counting on from a chunk's key is another chunk's by chance only.
    step_Ck = below(hash32((key_C1 + 1 + stretch_k) & _MASK), next_k - edge_k)
    turn_C1 = below(hash32(key_C1 ^ _MASK), length)
    return (edge_k + step_Ck + turn_C1) % length
