"""Parameters of which every process holds a part: collected on the main one, and spread from it, piece by piece.

No process but the main one ever holds more than its part, and the main one no more than the fragment that it asked for.
Each part crosses once, in the dtype that the model has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from decentral.parameters import Fragment, split
from decentral.parameters.sharding import Box, boxes_of, holders, is_sharded, local_part
from decentral.training.processes.group import MAIN, Processes

# Shape suffix: N = elements of one fragment, flat float32, on the processor of the main process.


AHEAD = 8  # parts on their way at once: a process that is woken for each alone waits for the processor each time


class Shards:
    """Every process calls the same method with the same tensor at once; only the main one gives or gets it whole."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes

    def read(self, parameters: Mapping[str, Tensor], fragment: Fragment) -> Tensor:
        """One fragment (N,), on the main process; (0,) elsewhere."""
        flat_N = torch.empty(fragment.numel if self._processes.is_main else 0)
        pieces = split(flat_N, fragment) if self._processes.is_main else [None] * len(fragment.parameters)
        specs = zip(fragment.parameters, pieces, strict=True)
        _in_turn(end for spec, piece in specs for end in self._collecting(parameters[spec.name], piece))
        return flat_N

    def write(self, flat_N: Tensor, fragment: Fragment, parameters: Mapping[str, Tensor]) -> None:
        """Overwrite one fragment in place; ``flat_N`` is looked at on the main process."""
        pieces = split(flat_N, fragment) if self._processes.is_main else [None] * len(fragment.parameters)
        specs = zip(fragment.parameters, pieces, strict=True)
        _in_turn(end for spec, piece in specs for end in self._spreading(piece, parameters[spec.name]))

    def whole(self, tensor: Tensor) -> Tensor | None:
        """All of a tensor in its own dtype, on the processor; None elsewhere than on the main process."""
        made = torch.empty(tensor.shape, dtype=tensor.dtype) if self._processes.is_main else None
        _in_turn(self._collecting(tensor, made))
        return made

    def spread(self, source: Tensor | None, tensor: Tensor) -> None:
        """Values of the main process, of any dtype, into ``tensor``, on every process its part."""
        _in_turn(self._spreading(source, tensor))

    def _collecting(self, tensor: Tensor, into: Tensor | None) -> Iterator[Callable[[], None]]:
        """All of ``tensor`` into one of the main process, of any dtype: each step begins when it is asked for, and has
        an end.
        """
        held = local_part(tensor)
        for rank, box in self._holders(tensor).items():
            if into is not None and rank == MAIN:
                box.of(into).copy_(held)
            elif into is not None:
                yield self._receiving(box.of(into), tensor.dtype, rank)
            elif rank == self._processes.rank:
                yield self._processes.begin_send(held, MAIN)

    def _spreading(self, source: Tensor | None, tensor: Tensor) -> Iterator[Callable[[], None]]:
        held = local_part(tensor)
        for rank, box in sorted(self._boxes(tensor).items()):
            if source is not None and box.numel and rank == MAIN:
                held.copy_(box.of(source))
            elif source is not None and box.numel:
                yield self._processes.begin_send(box.of(source).to(tensor.dtype), rank)
            elif box.numel and rank == self._processes.rank:
                yield self._receiving(held, tensor.dtype, MAIN)

    def _receiving(self, part: Tensor, dtype: torch.dtype, sender: int) -> Callable[[], None]:
        """Into ``part``, which is where it lands if it can be: new memory costs more than the copy."""
        if part.device.type == "cpu" and part.dtype == dtype and part.is_contiguous():
            return self._processes.begin_receive(part, sender)
        landed = torch.empty(part.shape, dtype=dtype)
        arrives = self._processes.begin_receive(landed, sender)

        def end() -> None:
            arrives()
            part.copy_(landed)

        return end

    def _boxes(self, tensor: Tensor) -> dict[int, Box]:
        """Every process has all of what is not sharded: FSDP2 leaves what it is told to ignore."""
        if is_sharded(tensor):
            return boxes_of(tensor)
        return dict.fromkeys(range(self._processes.size), Box((0,) * tensor.dim(), tuple(tensor.shape)))

    def _holders(self, tensor: Tensor) -> dict[int, Box]:
        return holders(self._boxes(tensor))


@torch.no_grad()
def _in_turn(steps: Iterable[Callable[[], None]]) -> None:
    """Begin the steps, and end them in their order, a few at a time."""
    begun: deque[Callable[[], None]] = deque()
    for end in steps:
        begun.append(end)
        if len(begun) > AHEAD:
            begun.popleft()()
    while begun:
        begun.popleft()()
