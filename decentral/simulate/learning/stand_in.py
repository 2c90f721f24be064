"""Small tensors that stand for a real model: bytes and seconds of the real one, arithmetic of a few hundred values.

One byte of a bulk protocol takes the time of as many bytes as the real frame is larger than the small one. The real
size is what the run's own codec makes of Gaussian values, entropy coding included; control messages are as they are.
A reduce sends slices, so it is slices that are compared: of few values the scale and the kind of coding are a third
of the bytes, of a real slice they are nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from decentral.dissemination import broadcast
from decentral.dissemination.broadcast import PIECE
from decentral.dissemination.reduce import Grain, partition
from decentral.manifest import Manifest
from decentral.parameters import Fragment
from decentral.replica.codec import Codec, codec_of
from decentral.rounds.snapshots import ANY_FORM, PACKED
from decentral.simulate.learning.lessons import LessonName, toy_schema
from decentral.transport.memory import Weight
from decentral.transport.requests import PREFIX_NBYTES
from decentral.wire.frames import HEADER_NBYTES
from decentral.wire.pieces import PIECE_HEAD_NBYTES

SAMPLE = 1 << 22  # values that are encoded; a larger model is so many times as large
DRAWS = 16  # small bodies that are made: one alone is up to a tenth longer or shorter than most
WHOLE = Grain(align=1, piece=1 << 30)  # of a reduce of small tensors: as many parts as owners

# Shape suffix: N = elements, flat float32.


@dataclass(frozen=True, slots=True)
class StandIn:
    """How much the small model's bytes stand for."""

    protocols: Mapping[str, Weight]
    body: float  # bytes of a real frame's body for one of a small one
    offer: float  # the same of what an offer names, which is what a peer's rate is compared with
    grain: Grain


def stand_in_for(manifest: Manifest, num_parameters: int, peers: int, lesson: LessonName = "tiles") -> StandIn:
    """What the small model of a forecast with ``peers`` peers stands for. Lengths and headers are as they are."""
    codec, numel = codec_of(manifest), max(1, num_parameters // manifest.outer.fragments)
    toy = toy_schema(lesson, manifest.outer.fragments).fragments
    cuts = max(1, peers) if manifest.exchange.kind == "reduce" else 1
    real = body_nbytes(codec, max(1, numel // cuts))
    small = _small_nbytes(codec, toy[0], cuts)
    body = real / small if small else 1.0  # frames without a body stand for themselves
    state = Weight(num_parameters / sum(fragment.numel for fragment in toy), PREFIX_NBYTES + ANY_FORM.size)
    frame = Weight(body, PREFIX_NBYTES + HEADER_NBYTES)
    piece = Weight(body, PREFIX_NBYTES + PIECE_HEAD_NBYTES)
    protocols = {broadcast.PUSH: frame, broadcast.FETCH: frame, PIECE: piece, PACKED: state}
    whole = (HEADER_NBYTES + real) / (HEADER_NBYTES + small)
    offer = numel / toy[0].numel if manifest.exchange.kind == "reduce" else whole  # a reduce's: all bodies at most
    return StandIn(protocols, body, offer, WHOLE)


def body_nbytes(codec: Codec, numel: int) -> float:
    """Bytes of the body that ``numel`` Gaussian values make, as a matrix of up to 4 M of them."""
    columns = min(numel, 2048)
    rows = max(1, min(numel, SAMPLE) // columns)
    sample_N = torch.randn(rows * columns, generator=torch.Generator().manual_seed(0))
    return len(codec.encode(sample_N, {}, ((rows, columns),)).body) * (numel / (rows * columns))


def _small_nbytes(codec: Codec, toy: Fragment, cuts: int) -> float:
    """Bytes of a small body: of the whole fragment, or of one of ``cuts`` slices of it, on average."""
    generator = torch.Generator().manual_seed(0)
    if cuts == 1:
        shapes = [toy.shapes]
    else:
        owners = [number.to_bytes(4, "big") for number in range(cuts)]
        shapes = [((stop - start,),) for _, start, stop in partition(toy.numel, owners, grain=WHOLE)]
    draws = [torch.randn(toy.numel, generator=generator) for _ in range(DRAWS)]
    sizes = [len(codec.encode(one_N[: _numel(cut)], {}, cut).body) for one_N in draws for cut in shapes]
    return statistics.fmean(sizes)


def _numel(shapes: tuple[tuple[int, ...], ...]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)
