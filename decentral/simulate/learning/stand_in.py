"""Small tensors that stand for a real model: bytes and seconds of the real one, arithmetic of a few hundred values.

One byte of a bulk protocol takes the time of as many bytes as the real frame is larger than the small one. The real
size is what the run's own codec makes of Gaussian values, entropy coding included; control messages are as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from decentral.dissemination import gather
from decentral.dissemination.partition import Grain
from decentral.dissemination.passing import PIECE
from decentral.manifest import Manifest
from decentral.replica.codec import Codec
from decentral.replica.run_codec import codec_of
from decentral.rounds.catchup.donor import ANY_FORM, PACKED
from decentral.simulate.learning.lessons import LessonName, toy_schema
from decentral.transport.memory.pipe import Weight
from decentral.transport.requests import PREFIX_NBYTES
from decentral.wire.frames import HEADER_NBYTES
from decentral.wire.pieces import PIECE_HEAD_NBYTES

SAMPLE = 1 << 22  # values that are encoded; a larger model is so many times as large

# Shape suffix: N = elements, flat float32.


@dataclass(frozen=True, slots=True)
class StandIn:
    """How much the small model's bytes stand for."""

    protocols: Mapping[str, Weight]
    body: float  # bytes of a real frame's body for one of a small one
    grain: Grain  # of a reduce: as many parts as owners


def stand_in_for(manifest: Manifest, num_parameters: int, lesson: LessonName = "noise") -> StandIn:
    """What the small model of a forecast stands for. Lengths and headers are as they are."""
    codec = codec_of(manifest)
    toy = toy_schema(lesson, manifest.outer.fragments).fragments
    real = _body_nbytes(codec, max(1, num_parameters // manifest.outer.fragments))
    small_N = torch.randn(toy[0].numel, generator=torch.Generator().manual_seed(0))
    small = len(codec.encode(small_N, {}, toy[0].shapes).body)
    body = real / small if small else 1.0  # frames without a body stand for themselves
    state = Weight(num_parameters / sum(fragment.numel for fragment in toy), PREFIX_NBYTES + ANY_FORM.size)
    frame = Weight(body, PREFIX_NBYTES + HEADER_NBYTES)
    piece = Weight(body, PREFIX_NBYTES + PIECE_HEAD_NBYTES)
    protocols = {gather.PUSH: frame, gather.FETCH: frame, PIECE: piece, PACKED: state}
    return StandIn(protocols, body, Grain(align=1, piece=1 << 30))


def _body_nbytes(codec: Codec, numel: int) -> float:
    """Bytes of the body that ``numel`` Gaussian values make, as a matrix of up to 4 M of them."""
    columns = min(numel, 2048)
    rows = max(1, min(numel, SAMPLE) // columns)
    sample_N = torch.randn(rows * columns, generator=torch.Generator().manual_seed(0))
    return len(codec.encode(sample_N, {}, ((rows, columns),)).body) * (numel / (rows * columns))
