"""Parameters of which every process holds a part: collected on the main one, and spread from it, piece by piece.

No process but the main one ever holds more than its part, and the main one no more than the fragment that it asked for.
Each part crosses once, in the dtype that the model has.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from decentral.parameters import Fragment, split
from decentral.parameters.sharding import Box, boxes_of, holders, is_sharded, local_part
from decentral.training.processes.group import MAIN, Processes

# Shape suffix: N = elements of one fragment, flat float32, on the processor of the main process.


class Shards:
    """Every process calls the same method with the same tensor at once; only the main one gives or gets it whole."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes

    def read(self, parameters: Mapping[str, Tensor], fragment: Fragment) -> Tensor:
        """One fragment (N,), on the main process; (0,) elsewhere."""
        flat_N = torch.empty(fragment.numel if self._processes.is_main else 0)
        pieces = split(flat_N, fragment) if self._processes.is_main else [None] * len(fragment.parameters)
        for spec, piece in zip(fragment.parameters, pieces, strict=True):
            self.collect(parameters[spec.name], piece)
        return flat_N

    def write(self, flat_N: Tensor, fragment: Fragment, parameters: Mapping[str, Tensor]) -> None:
        """Overwrite one fragment in place; ``flat_N`` is looked at on the main process."""
        pieces = split(flat_N, fragment) if self._processes.is_main else [None] * len(fragment.parameters)
        for spec, piece in zip(fragment.parameters, pieces, strict=True):
            self.spread(piece, parameters[spec.name])

    def whole(self, tensor: Tensor) -> Tensor | None:
        """All of a tensor in its own dtype, on the processor; None elsewhere than on the main process."""
        made = torch.empty(tensor.shape, dtype=tensor.dtype) if self._processes.is_main else None
        self.collect(tensor, made)
        return made

    @torch.no_grad()
    def collect(self, tensor: Tensor, into: Tensor | None) -> None:
        """All of ``tensor`` into a tensor of the main process, of any dtype."""
        held = local_part(tensor)
        for rank, box in self._holders(tensor).items():
            if into is not None:
                box.of(into).copy_(held if rank == MAIN else self._received(box, tensor.dtype, rank))
            elif rank == self._processes.rank:
                self._processes.send(held, MAIN)

    @torch.no_grad()
    def spread(self, source: Tensor | None, tensor: Tensor) -> None:
        """Values of the main process, of any dtype, into ``tensor``, on every process its part."""
        held = local_part(tensor)
        for rank, box in sorted(self._boxes(tensor).items()):
            if not box.numel:
                continue
            if source is not None:
                part = box.of(source)
                if rank == MAIN:
                    held.copy_(part)
                else:
                    self._processes.send(part.to(tensor.dtype), rank)
            elif rank == self._processes.rank:
                held.copy_(self._received(box, tensor.dtype, MAIN))

    def _received(self, box: Box, dtype: torch.dtype, sender: int) -> Tensor:
        made = torch.empty(box.shape, dtype=dtype)
        self._processes.receive(made, sender)
        return made

    def _boxes(self, tensor: Tensor) -> dict[int, Box]:
        """Every process has all of what is not sharded: FSDP2 leaves what it is told to ignore."""
        if is_sharded(tensor):
            return boxes_of(tensor)
        return dict.fromkeys(range(self._processes.size), Box((0,) * tensor.dim(), tuple(tensor.shape)))

    def _holders(self, tensor: Tensor) -> dict[int, Box]:
        return holders(self._boxes(tensor))
