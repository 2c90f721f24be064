"""SparseLoCo's compression as its authors publish it, written in plain torch: what ours is measured against.

Per tensor: error feedback, 64x64 tiles, the k largest of each, one four-bin grid per tensor (mean, 6 standard
deviations, bin means), 12-bit indices two in three bytes, 2-bit codes four in a byte.

Source: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025, arXiv:2508.15706.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["PublishedSparseLoCo"]

_SIDE, _BINS, _RANGE = 64, 4, 6.0


@dataclass(frozen=True, slots=True)
class PublishedSparseLoCo:
    """Matrices whose sides are multiples of 64; any other tensor, a norm's weights say, is sent as it is."""

    k: int = 64
    decay: float = 0.95

    def encode(self, gradient: Tensor, debt: Tensor) -> tuple[list[Tensor], Tensor]:
        """The tensors to send, and the new debt."""
        owed = debt * self.decay + gradient
        if not _has_tiles(owed):
            return [owed], torch.zeros_like(owed)
        tiles = _tiles(owed)
        index = tiles.abs().topk(self.k, dim=1).indices.sort(dim=1).values
        values = tiles.gather(1, index)
        mean = values.mean()
        scale = _RANGE * values.std() / _BINS
        code = ((values - mean) / scale + _BINS / 2).round().clamp(0, _BINS - 1).long()
        centred = (values - mean).flatten()
        total = torch.zeros(_BINS).scatter_add_(0, code.flatten(), centred)
        lookup = total / torch.bincount(code.flatten(), minlength=_BINS).clamp(min=1)
        sent = [_pack12(index), _pack2(code), torch.cat([lookup, mean[None], scale[None]])]
        return sent, owed - self.decode(sent, owed)

    def decode(self, sent: list[Tensor], like: Tensor) -> Tensor:
        """The dense tensor."""
        if not _has_tiles(like):
            return sent[0]
        tiles = _tiles(torch.zeros_like(like))
        index = _unpack12(sent[0]).view(len(tiles), self.k)
        code = _unpack2(sent[1]).view(len(tiles), self.k)
        values = sent[2][:_BINS][code] + sent[2][_BINS]
        return _untile(tiles.scatter(1, index, values), like)

    @staticmethod
    def nbytes(sent: list[Tensor]) -> int:
        """Bytes on the wire."""
        return sum(tensor.numel() * tensor.element_size() for tensor in sent)


def _has_tiles(tensor: Tensor) -> bool:
    return tensor.dim() == 2 and all(side % _SIDE == 0 for side in tensor.shape)


def _tiles(matrix: Tensor) -> Tensor:
    rows, columns = matrix.shape
    return matrix.view(rows // _SIDE, _SIDE, columns // _SIDE, _SIDE).permute(0, 2, 1, 3).reshape(-1, _SIDE * _SIDE)


def _untile(tiles: Tensor, like: Tensor) -> Tensor:
    rows, columns = like.shape
    return tiles.view(rows // _SIDE, columns // _SIDE, _SIDE, _SIDE).permute(0, 2, 1, 3).reshape(rows, columns)


def _pack12(index: Tensor) -> Tensor:
    first, second = index.reshape(-1, 2).unbind(1)
    return torch.stack([first & 255, (first >> 8) | ((second & 15) << 4), second >> 4], dim=1).to(torch.uint8)


def _unpack12(packed: Tensor) -> Tensor:
    low, middle, high = packed.long().unbind(1)
    return torch.stack([low | ((middle & 15) << 8), (middle >> 4) | (high << 4)], dim=1).flatten()


def _pack2(code: Tensor) -> Tensor:
    a, b, c, d = code.reshape(-1, 4).unbind(1)
    return (a | (b << 2) | (c << 4) | (d << 6)).to(torch.uint8)


def _unpack2(packed: Tensor) -> Tensor:
    wide = packed.long()
    return torch.stack([wide & 3, (wide >> 2) & 3, (wide >> 4) & 3, wide >> 6], dim=1).flatten()
