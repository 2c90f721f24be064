"""What this peer gave to the last rounds, as the others applied it: should those rounds be given up, it is owed again.

Kept compressed, as it was sent: a gather's body is the very bytes the frame store holds, so it costs nothing there.
Bounded by rounds and by bytes, the oldest dropped first. Not kept over a restart.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

from decentral.compressors import Nothing
from decentral.replica.codec import Codec, FixedShapes, numel, range_shapes
from decentral.replica.contribution import Contribution
from decentral.wire.frames import FrameKind
from decentral.wire.messages import Record

# Shape suffix: N = elements of one fragment, flat float32.

ROUNDS = 64  # as many as their frames are kept for others

Piece = tuple[int, int, bytes | memoryview]  # elements [start, stop) of the fragment, and what was sent of them


@dataclass(frozen=True, slots=True)
class Given:
    """One contribution of this peer that a commit names."""

    fragment: int
    steps: int
    sliced: bool  # for a reduce, which compresses flat ranges; a gather compresses parameter by parameter
    pieces: tuple[Piece, ...]
    channels: int = 1  # in each of them, the change first

    @property
    def nbytes(self) -> int:
        """What it holds in memory."""
        return sum(len(body) for _, _, body in self.pieces)


@dataclass(frozen=True, slots=True)
class Owed:
    """What this peer gave to rounds that were given up, over one fragment."""

    gradient_N: Tensor
    steps: int
    rounds: int


class Outbox:
    """This peer's named contributions by round."""

    def __init__(self, codec: Codec, capacity: int) -> None:
        self.codec = codec
        self.capacity = capacity  # bytes
        self.nbytes = 0
        self._given: OrderedDict[int, Given] = OrderedDict()

    def add(self, record: Record, contribution: Contribution) -> None:
        """Remember what ``record`` took from this peer. What only a summary told is in no frame, and is lost."""
        if contribution.kind != FrameKind.CONTRIBUTION or isinstance(self.codec.compressor, Nothing):
            return
        sliced = contribution.encoded is None
        given = Given(
            contribution.fragment,
            contribution.trained,
            sliced,
            _pieces(record, contribution),
            1 + len(contribution.states),
        )
        self._given[record.round] = given
        self.nbytes += given.nbytes
        while len(self._given) > ROUNDS or (self.nbytes > self.capacity and len(self._given) > 1):
            self.nbytes -= self._given.popitem(last=False)[1].nbytes

    def owed(self, after: int, fragment: int, shapes: FixedShapes, sent_N: Tensor | None = None) -> Owed | None:
        """What was given to ``fragment`` in rounds after ``after``; None when that is nothing.

        ``sent_N``: where receivers add up what comes, what they hold of this peer now. Each round applied what they
        held then, so it is the sum of these.
        """
        given = [g for round_, g in self._given.items() if round_ > after and g.fragment == fragment]
        if not given:
            return None
        total_N = torch.zeros(numel(shapes))
        for one in reversed(given) if sent_N is not None else given:
            came_N = self._came(one, shapes)
            total_N += came_N if sent_N is None else sent_N
            sent_N = None if sent_N is None else sent_N - came_N
        return Owed(total_N, sum(one.steps for one in given), len(given))

    def _came(self, one: Given, shapes: FixedShapes) -> Tensor:
        """The change that the others decoded."""
        came_N = torch.zeros(numel(shapes))
        for start, stop, body in one.pieces:
            cut = range_shapes(start, stop) if one.sliced else shapes
            came_N[start:stop] = self.codec.decode(body, cut * one.channels, one.channels)[: stop - start]
        return came_N

    def forget_after(self, round_: int) -> None:
        """Those rounds are given up: what was given to them is owed, or is not known to be."""
        self._given = OrderedDict((r, given) for r, given in self._given.items() if r <= round_)
        self.nbytes = sum(given.nbytes for given in self._given.values())


def _pieces(record: Record, contribution: Contribution) -> tuple[Piece, ...]:
    if contribution.encoded is not None:
        return ((0, contribution.local_N.numel(), contribution.encoded.body),)
    made = contribution.slices.get(record.plan, {})
    ranges = enumerate(record.partition)
    return tuple((start, stop, made[part].body) for part, (_, start, stop) in ranges if part in made)
