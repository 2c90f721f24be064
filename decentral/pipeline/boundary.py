"""Boundaries between the stages of one replica: fewer bytes for hidden states on, and for their gradients back.

    Z = narrow(X) ;  Z~ = round(Z) crosses ;  X^ = widen(Z~) ;  G_Z = dL/dZ~ ;  round(G_Z) crosses back

X (..., D) is what a stage made of some tokens, X^ what the next stage goes on with. `narrow` is the sender's and
`widen` the receiver's, ordinary functions that autograd goes through on either machine; `crossing` is the wire between
them. What depends on tokens alone, which are two bytes each, is taken off before and put back after.

| narrow, widen | Z | takes | loses |
|---|---|---|---|
| nothing | X | D values | nothing |
| `Subspace` | (X - T_out[token]) U | K | nothing, while what stages add to X lies in the span of U |
| `Mapl` | (X - S_p[token] R_p) A | K | what A does not reach |

U is fixed for a run. A stage adds to X by the output matrices of its attention and MLP, so these and the trained part
of the embedding must stay in the span: `onto` says what of a matrix does, and `T_out = T - T U U^T` is what of the
embedding does not. An embedding that whole replicas train too may leave the span with every outer step: T_out is then
what of the *new* one does, and nothing is lost.

A lies on the Stiefel manifold, A^T A = 1, and is learnt with the model, by `StiefelMomentum`; so is the table S of each
side. R is fixed.

Sources: Ramasinghe et al., "Protocol Models: Scaling Decentralized Training with Communication-Efficient Model
Parallelism", 2025, arXiv:2506.01260 (`Subspace`); "MAPL", 2026, arXiv:2606.05484 (`Mapl`); whole and piped replicas
side by side: "Heterogeneous Low-Bandwidth Pre-Training of LLMs", 2026, arXiv:2601.02360.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from decentral.errors import ConfigError

__all__ = [
    "ROUNDINGS",
    "BFloat16",
    "Exact",
    "Int8",
    "Mapl",
    "Rounding",
    "StiefelMomentum",
    "Subspace",
    "crossing",
    "draw_basis",
    "onto",
    "polar",
]

# Shape suffixes: D = width of the model, K = values that cross for each token, V = vocabulary, B = blocks, L = values
# of a block.


# ---- what a value becomes on its way ----


class Rounding(Protocol):
    """Numbers of less precision, both ways."""

    def pack(self, values: Tensor) -> tuple[Tensor, ...]:
        """Return what is sent in place of ``values`` (..., n)."""
        ...

    def unpack(self, sent: tuple[Tensor, ...]) -> Tensor:
        """Return float32 (..., n) of what came."""
        ...


@dataclass(frozen=True, slots=True)
class Exact:
    """Float32, four bytes a value."""

    def pack(self, values: Tensor) -> tuple[Tensor, ...]:
        """Return the values."""
        return (values.float(),)

    def unpack(self, sent: tuple[Tensor, ...]) -> Tensor:
        """Return the values."""
        return sent[0]


@dataclass(frozen=True, slots=True)
class BFloat16:
    """Two bytes a value, to the nearest."""

    def pack(self, values: Tensor) -> tuple[Tensor, ...]:
        """Return bfloat16."""
        return (values.bfloat16(),)

    def unpack(self, sent: tuple[Tensor, ...]) -> Tensor:
        """Return float32."""
        return sent[0].float()


@dataclass(frozen=True, slots=True)
class Int8:
    """A byte a value, and two a block: value = code * scale, scale = largest of the block / 127, to the nearest.

    ConfigError where a block has no value.
    """

    block: int = 64

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ConfigError(f"int8: block = {self.block}: must be at least 1; take 64")

    def pack(self, values: Tensor) -> tuple[Tensor, ...]:
        """Return codes int8 (..., n), and scales bfloat16 (..., blocks), of which the last may be short.

        A scale is rounded up, so that no code is beyond 127; a block of zeros has scale zero. What is not finite makes
        its scale so, and comes out as NaN: it is for the loss to say.
        """
        value_BL = self._blocks(values.float())
        least = value_BL.abs().amax(dim=-1) / 127
        scale = least.bfloat16()
        scale = torch.where(scale.float() < least, _next_up(scale), scale)
        code_BL = (value_BL / scale.float().clamp(min=_TINY).unsqueeze(-1)).nan_to_num(0.0).round().clamp(-127, 127)
        return code_BL.to(torch.int8).flatten(-2)[..., : values.shape[-1]], scale

    def unpack(self, sent: tuple[Tensor, ...]) -> Tensor:
        """Return float32 (..., n)."""
        code, scale = sent
        value_BL = self._blocks(code.float()) * scale.float().unsqueeze(-1)
        return value_BL.flatten(-2)[..., : code.shape[-1]]

    def _blocks(self, values: Tensor) -> Tensor:
        """Return (..., B, L), the last block filled with zeros."""
        short = -values.shape[-1] % self.block
        padded = nn.functional.pad(values, (0, short))
        return padded.view(*padded.shape[:-1], padded.shape[-1] // self.block, self.block)


_TINY = torch.finfo(torch.float32).tiny


def _next_up(scale: Tensor) -> Tensor:
    """Return the next bfloat16 above positive ones."""
    return (scale.view(torch.int16) + 1).view(torch.bfloat16)


ROUNDINGS: tuple[Rounding, ...] = (Exact(), BFloat16(), Int8())  # by their numbers on the wire


class _Crossing(torch.autograd.Function):
    """The wire: its gradient goes over the same one back."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, rounding: Rounding) -> Tensor:
        ctx.rounding = rounding
        return rounding.unpack(rounding.pack(values)).to(values.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.rounding.unpack(ctx.rounding.pack(gradient)).to(gradient.dtype), None


def crossing(values: Tensor, rounding: Rounding) -> Tensor:
    """Return what the other side gets of ``values``; what comes back is rounded alike."""
    made: Tensor = _Crossing.apply(values, rounding)  # type: ignore[no-untyped-call]
    return made


# ---- a fixed subspace ----


def draw_basis(width: int, kept: int, generator: torch.Generator) -> Tensor:
    """Return orthonormal columns float32 (D, K), uniformly distributed. ConfigError unless 1 <= K <= D."""
    if not 1 <= kept <= width:
        raise ConfigError(f"a boundary of {kept} values for states of {width}: take 1 to {width}")
    drawn_DK = torch.randn(width, kept, generator=generator, dtype=torch.float64, device="cpu")
    basis_DK, upper_KK = torch.linalg.qr(drawn_DK)
    drawn: Tensor = basis_DK * upper_KK.diagonal().sign()
    return drawn.float()


def onto(basis_DK: Tensor, values: Tensor) -> Tensor:
    """Return the part of ``values`` (..., D) that lies in the span of the basis.

    Of a matrix that writes to hidden states, (D, inputs), give the transpose.
    """
    return (values @ basis_DK) @ basis_DK.T


@dataclass(frozen=True, slots=True)
class Subspace:
    """Coordinates in a fixed basis, beside what the embedding has out of its span."""

    basis_DK: Tensor

    def outside(self, embedding_VD: Tensor) -> Tensor:
        """Return the part of an embedding that does not cross, because both sides have it; it learns nothing here."""
        embedding_VD = embedding_VD.detach()
        return embedding_VD - onto(self.basis_DK, embedding_VD)

    def narrow(self, states: Tensor, outside: Tensor) -> Tensor:
        """Return (..., K) of states (..., D); ``outside``: that part of each token's embedding."""
        return (states - outside) @ self.basis_DK

    def widen(self, came: Tensor, outside: Tensor) -> Tensor:
        """Return (..., D) of what came."""
        return came @ self.basis_DK.T + outside


# ---- a subspace that is learnt ----


class Mapl(nn.Module):
    """A learnt basis, and a table of a few values for each token on either side.

    ``basis_DK`` is for `StiefelMomentum`; both tables are for the model's own optimizer.
    """

    def __init__(self, basis_DK: Tensor, mixing_KD: Tensor, embedding_VD: Tensor) -> None:
        """Begin with tables that come nearest to the embedding by ``mixing_KD``, fixed and orthonormal by rows."""
        super().__init__()
        self.basis_DK = nn.Parameter(basis_DK.clone())
        self.register_buffer("mixing_KD", mixing_KD)
        nearest_VK = embedding_VD.detach() @ mixing_KD.T
        self.before_VK, self.after_VK = nn.Parameter(nearest_VK.clone()), nn.Parameter(nearest_VK.clone())

    mixing_KD: Tensor

    def narrow(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Return (..., K) of states (..., D) and their tokens (...)."""
        return (states - self.before_VK[tokens] @ self.mixing_KD) @ self.basis_DK

    def widen(self, came: Tensor, tokens: Tensor) -> Tensor:
        """Return (..., D) of what came."""
        return came @ self.basis_DK.T + self.after_VK[tokens] @ self.mixing_KD


def polar(matrix_DK: Tensor) -> Tensor:
    """Return the nearest matrix with orthonormal columns, U V^T of the singular value decomposition U S V^T."""
    left_DK, _, right_KK = torch.linalg.svd(matrix_DK.double(), full_matrices=False)
    nearest_DK: Tensor = left_DK @ right_KK
    return nearest_DK.to(matrix_DK.dtype)


class StiefelMomentum:
    """Steps of a matrix with orthonormal columns, along the manifold of these.

    G <- G - A sym(A^T G) ;  m <- beta m + (1 - beta) G ;  A <- polar(A - lr polar(m))

    A step is as long whatever the gradient's size, so a gradient of zeros, before which there was none, makes none.
    """

    def __init__(self, basis_DK: Tensor, lr: float, beta: float = 0.9) -> None:
        self._basis_DK, self._lr, self._beta = basis_DK, lr, beta
        self._momentum_DK = torch.zeros_like(basis_DK)

    @torch.no_grad()
    def step(self) -> None:
        """Move along the gradient that is there, if any, and forget it."""
        gradient_DK = self._basis_DK.grad
        if gradient_DK is None:
            return
        inner_KK = self._basis_DK.T @ gradient_DK
        tangent_DK = gradient_DK - self._basis_DK @ (inner_KK + inner_KK.T) / 2
        self._momentum_DK.lerp_(tangent_DK, 1 - self._beta)
        if bool(self._momentum_DK.any()):
            self._basis_DK.copy_(polar(self._basis_DK - self._lr * polar(self._momentum_DK)))
        self._basis_DK.grad = None
