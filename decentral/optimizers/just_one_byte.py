"""Just one byte: a peer sends a byte per inner step, and everybody makes the whole step of it.

inner step s: g_s = dL/dz_s, z_s of random signs ;  at a round: x <- x - lr/sqrt(n) * sum over all peers of g_s * z_s

n: all derivatives of those who came. Each is a byte in the offer's summary, beside a seed and a number that say z_s:
12 + H bytes a round, whatever the model's size, and an empty frame's header. Every peer makes the z_s again: 1 ms of a
core each for a million values. After an absence only the newest are told, as many as inner steps count.

An inner optimizer that only goes forward (``[inner] optimizer = "spsa"``) measures g_s by two losses. Beside one that
goes by gradients, g_s is the gradient along z_s, which becomes the gradient: the same to the order of ``eps`` squared.

What differs from the paper. There a peer stands still between two rounds; here inner steps walk, the commit replaces
the walk, and g_s is measured where it is, as in FedKSeed. Directions there are Gaussian, by bits that depend on the
device; its byte has no sign, see `byte_of`. The authors' code divides the rate by n; here by sqrt(n), as the sum grows.

Robustness: a byte is worth 234 at most. Who lies moves all by that, as anyone's gradient would.

Source: Zelikman et al., "Just One Byte (per gradient): A Note on Low-Bandwidth Decentralized Language Model Finetuning
Using Shared Randomness", 2023, arXiv:2306.10015. Local steps: Qin et al., "Federated Full-Parameter Tuning of
Billion-Sized Language Models with Communication Cost under 18 Kilobytes" (FedKSeed), 2023, arXiv:2312.06353.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decentral.optimizers.base import (
    MAX_SUMMARY_NBYTES,
    Contributor,
    Derivative,
    Layout,
    Live,
    Own,
    Preset,
    RoundInfo,
    Speaking,
    State,
    rate,
)
from decentral.optimizers.steps import sgd
from decentral.tensors.memory import fresh
from decentral.tensors.ops import float32, philox_4x32

__all__ = [
    "LARGEST_LEVEL",
    "MOST_DERIVATIVES",
    "MOST_NUMBER",
    "Direction",
    "JustOneByte",
    "ToldDerivatives",
    "byte_of",
    "keep_newer",
    "level_of",
    "next_direction",
    "note",
    "noted",
]

# ---- the method ----

# Shape suffix: N = values of a fragment, flat float32.


@dataclass(frozen=True, slots=True)
class JustOneByte(Speaking):
    """Descent along random directions; no state."""

    name: ClassVar[str] = "just_one_byte"
    equation: ClassVar[str] = "inner: g_s = dL/dz_s ; x <- x - lr/sqrt(n)*sum(g_s*z_s), z_s from seeds"
    source: ClassVar[str] = 'Zelikman et al., "Just One Byte (per gradient)", 2023, arXiv:2306.10015'
    preset: ClassVar[Preset] = Preset(
        hyper={"learning_rate": 0.002},
        compressor="none",
        exchange="gather",
        inner={"optimizer": "spsa", "learning_rate": 2e-4, "weight_decay": 0.0, "clip": None},
        demo={
            "model": {"hidden": 32, "layers": 1, "context": 64},  # 21,600 parameters: few, so that steps can be long
            "inner": {"learning_rate": 3e-3, "steps": 16, "weight_decay": 0.0, "clip": None},
            "outer": {"learning_rate": 0.012},
        },
        behind="just_one_byte was no better than a peer alone on a small student with an inner rate of 0.001 (1.734 "
        "against 1.733 after 3,000 steps): take it where a line carries nothing else.",
    )
    rebuilds: ClassVar[bool] = True
    most_steps: ClassVar[int | None] = MAX_SUMMARY_NBYTES - 12  # a byte for each, behind a seed and a number
    lr: float = rate(0.002)

    def before_inner_step(self, live: Live, fragment: int) -> None:
        """Where the step goes by a gradient: note it along a direction, and let the step go by no more than that."""
        if live.derivatives is not None or (gradient_N := live.read_gradient(fragment)) is None:
            return
        seed, number = next_direction(live.own(fragment), live.peer)
        direction_N = Direction(seed, number).over(live.layout(fragment))
        along = float(torch.dot(gradient_N.double(), direction_N.double()))
        if math.isfinite(along):  # else nothing is to be told, and what it does to the parameters is found there
            byte = byte_of(along)
            note(live.own(fragment), Derivative(seed, number, byte))
            live.add_to_gradient(fragment, direction_N.mul_(level_of(byte)).sub_(gradient_N))

    def after_inner_step(self, live: Live, fragment: int) -> None:
        """Where the step measured derivatives: note those."""
        for derivative in live.derivatives or ():
            note(live.own(fragment), derivative)

    def says(self, live: Live, fragment: int, sent: Sequence[Tensor]) -> bytes:
        """Say what no commit took yet: the newest, as many as inner steps count."""
        return noted(live.own(fragment)).newest(live.counted(fragment)).written()

    def after_commit(self, live: Live, fragment: int, state: State, sent: State | None, peers: Sequence[bytes]) -> None:
        """Keep what was noted since the contribution that the commit took."""
        if sent is not None and "next" in sent:
            keep_newer(live.own(fragment), sent)

    def progress_lost(self, live: Live, fragment: int) -> None:
        """They were of steps that count for nothing."""
        live.own(fragment).pop("levels", None)

    # ---- the replica's side ----

    def rebuilt(self, told: Contributor, layout: Layout) -> Tensor:
        """The sum over its derivatives."""
        return ToldDerivatives.read(told.summary).gradient(layout)

    def outer_step(
        self, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The peers' sum, which is their mean as often as they are, over the root of all derivatives."""
        counts = [len(ToldDerivatives.read(one.summary).levels) for one in info.contributors]
        scale = self.lr * max(1, len(counts)) / math.sqrt(max(1, sum(counts)))
        return sgd(anchor, received["change"], scale), {}


# ---- random directions, alike on every peer ----
#
# Of each value 1 or -1, from a seed, a number and a tensor's name.
#
# Bit j of a tensor's Philox words says the sign of its value j: 128 values a block, and no float on the way, so that
# no two machines differ. SPSA wants such signs: Gaussian values, which arXiv:2306.10015 draws, have a fourth moment of
# 3 instead of 1, so that the same estimate is noisier, and are made of logarithms, which differ in a library's last
# bit.
#
# Source: Spall, "Multivariate Stochastic Approximation Using a Simultaneous Perturbation Gradient Approximation",
# 1992.

# Shape suffixes: N = values of a fragment or of one tensor, B = blocks of a tensor.

MOST_NUMBER = (1 << 32) - 1
_BLOCK = 128  # bits
_HALF = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Direction:
    """A direction, of 2**96 that there are."""

    seed: int  # 64 bits
    number: int  # 32 bits

    def of(self, name: str, numel: int) -> Tensor:
        """Return the signs of the tensor of this name, flat float32 (N,)."""
        blocks = -(-numel // _BLOCK)
        counter_4B = np.empty((4, blocks), dtype=np.uint32)
        counter_4B[0] = np.arange(blocks, dtype=np.uint32)
        counter_4B[1] = self.number & _HALF
        counter_4B[2], counter_4B[3] = _halves(_hash(name))
        words_B4 = philox_4x32(counter_4B, _halves(self.seed)).T.astype("<u4")  # a block's words one behind the other
        return torch.from_numpy(_signs(words_B4.tobytes(), numel))

    def over(self, layout: Layout) -> Tensor:
        """Return the signs of a fragment's tensors in order, flat float32 (N,)."""
        return torch.cat([self.of(name, math.prod(shape)) for name, shape in layout.items()])


def _signs(bits: bytes, numel: int) -> NDArray[np.float32]:
    """1 of a bit that is not set, else -1."""
    signs_N = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=numel, bitorder="little").astype(np.float32)
    signs_N *= -2
    signs_N += 1
    return signs_N


def _halves(word: int) -> tuple[int, int]:
    """The lower half first."""
    return word & _HALF, word >> 32 & _HALF


@cache
def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


# ---- a derivative in one byte ----
#
# Its sign, and its magnitude to the nearest eighth of a power of two.
#
# byte = 128*(g < 0) + m ;  |g| = 2**((m - 64)/8)        m from 1 to 127: 0.0043 to 234; a byte of 0 is zero
#
# At most 4.5 % off inside that range; what lies beyond it is cut to its ends, so that no byte of a hostile peer is
# worth more than another's largest. Levels are float32 numbers of a table, for no two machines need have the same
# 2**x.
#
# The paper's byte is round(16 ln|g|) in all 8 bits: the sign has no place in it, and the authors' code sends a float
# in JSON. Here the steps are 1/8 of an octave, 1.4 times as wide.

_NEGATIVE = 128
_ONE = 64  # the byte of 1.0
_LARGEST_MAGNITUDE = 127
_EIGHTHS: Final = (1.0, 1.09050773, 1.18920712, 1.29683955, 1.41421356, 1.54221083, 1.68179283, 1.83400809)  # 2**(j/8)


def byte_of(derivative: float) -> int:
    """The byte of a finite derivative."""
    if abs(derivative) < 2.0 ** -(_ONE / 8):
        return 0
    m = max(1, min(_LARGEST_MAGNITUDE, round(8 * math.log2(abs(derivative))) + _ONE))
    return m + _NEGATIVE * (derivative < 0)


def _level(byte: int) -> float:
    octave, eighth = divmod((byte & _LARGEST_MAGNITUDE) - _ONE, 8)
    size = math.ldexp(float32(_EIGHTHS[eighth]), octave) if byte & _LARGEST_MAGNITUDE else 0.0
    return -size if byte & _NEGATIVE else size


_LEVELS: Final = tuple(_level(byte) for byte in range(256))
LARGEST_LEVEL: Final = _LEVELS[_LARGEST_MAGNITUDE]


def level_of(byte: int) -> float:
    """Return the float32 number that a byte stands for."""
    return _LEVELS[byte]


# ---- the summary of an offer ----
#
# A peer says in it along which directions its derivatives are, and a byte for each.
#
# Layout, little-endian: seed uint64, number uint32 of the first direction, then one byte for each, of directions whose
# numbers follow one another: 52 at most, for a summary has 64 bytes. Any bytes are read: those too few say nothing.

# Shape suffix: N = values of a fragment, flat float32.

_HEAD = struct.Struct("<QI")
MOST_DERIVATIVES = MAX_SUMMARY_NBYTES - _HEAD.size


@dataclass(frozen=True, slots=True)
class ToldDerivatives:
    """Derivatives of one peer, one after the other."""

    seed: int = 0
    first: int = 0
    levels: bytes = b""

    @classmethod
    def read(cls, summary: bytes) -> ToldDerivatives:
        """Nothing where the bytes are too few."""
        if len(summary) < _HEAD.size:
            return cls()
        seed, first = _HEAD.unpack_from(summary)
        return cls(seed, first, summary[_HEAD.size :])

    def newest(self, most: int) -> ToldDerivatives:
        """The last ``most`` of them."""
        cut = max(0, len(self.levels) - most)
        return ToldDerivatives(self.seed, self.first + cut & MOST_NUMBER, self.levels[cut:])

    def written(self) -> bytes:
        """As ``read`` wants it."""
        return _HEAD.pack(self.seed, self.first) + self.levels if self.levels else b""

    def gradient(self, layout: Layout) -> Tensor:
        """The sum of what each says: level * direction (N,). In this order, by sums alone: alike on every peer."""
        parts = [fresh(0)]
        for name, shape in layout.items():
            total_N = torch.zeros(shape, dtype=torch.float32, device="cpu").flatten()
            for place, byte in enumerate(self.levels):
                if level := level_of(byte):
                    direction = Direction(self.seed, self.first + place)
                    total_N += direction.of(name, len(total_N)).mul_(level)
            parts.append(total_N)
        return torch.cat(parts)


# ---- derivatives that no commit took yet ----
#
# A peer keeps what it measured in the state of its own that is in its checkpoints.
#
# ``own``: "levels" a byte for each of them (S,) ; "next" seed and number of the direction after the last (2,), int64.

_NO_LEVELS: Final = torch.zeros(0, dtype=torch.uint8, device="cpu")


def next_direction(own: Own, peer: bytes) -> tuple[int, int]:
    """Seed and number; those of gradients are numbered through a peer's life."""
    if "next" in own:
        seed, number = own["next"].tolist()
        return seed, number
    return int.from_bytes(hashlib.blake2b(peer, digest_size=8).digest(), "little") >> 1, 0  # 63 bits: int64 in ``own``


def note(own: Own, derivative: Derivative) -> None:
    """Note one more, and keep only the newest ``MOST_DERIVATIVES``. Another seed, of another process, begins anew."""
    before = own.get("levels", _NO_LEVELS)
    if "next" in own and own["next"].tolist() != [derivative.seed, derivative.number]:
        before = before[:0]
    level = torch.tensor([derivative.byte], dtype=torch.uint8, device="cpu")
    own["levels"] = torch.cat([before, level])[-MOST_DERIVATIVES:]
    following = [derivative.seed, derivative.number + 1 & MOST_NUMBER]
    own["next"] = torch.tensor(following, dtype=torch.int64, device="cpu")


def keep_newer(own: Own, sent: Mapping[str, Tensor]) -> None:
    """Forget what was noted when ``own`` was as ``sent`` has it: a commit took that."""
    since = int(own["next"][1] - sent["next"][1]) & MOST_NUMBER
    levels = own.get("levels", _NO_LEVELS)  # none where progress was given up since
    own["levels"] = levels[max(0, len(levels) - since) :]


def noted(own: Mapping[str, Tensor]) -> ToldDerivatives:
    """All of them."""
    levels = own.get("levels", _NO_LEVELS)
    if not len(levels):
        return ToldDerivatives()
    seed, number = own["next"].tolist()
    return ToldDerivatives(seed, number - len(levels) & MOST_NUMBER, bytes(levels.tolist()))
