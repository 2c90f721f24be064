"""Small tensors that stand for a real model: bytes and seconds of the real one, arithmetic of a few hundred values.

One byte of a bulk protocol takes the time of as many bytes as the real frame is larger than the small one. The real
size is what the run's own codec makes of Gaussian values, entropy coding included; control messages are as they are.
"""

from __future__ import annotations

import torch

from decentral.compressors import parse_compressor, parse_feedback
from decentral.exchange import gather
from decentral.exchange.codec import Codec
from decentral.manifest import Manifest
from decentral.rounds.donor import STATE
from decentral.simulate.lessons import LessonName, toy_schema
from decentral.wire.frames import HEADER_NBYTES

SAMPLE = 1 << 22  # values that are encoded; a larger model is so many times as large

# Shape suffix: N = elements, flat float32.


def weights_for(manifest: Manifest, num_parameters: int, lesson: LessonName = "noise") -> dict[str, float]:
    """For each bulk protocol, how many bytes of the real model one byte of the small one stands for."""
    codec = Codec(parse_compressor(manifest.compressor.chain), parse_feedback(manifest.compressor.feedback))
    toy = toy_schema(lesson, manifest.outer.fragments).fragments
    per_fragment = max(1, num_parameters // manifest.outer.fragments)
    frame = _body_nbytes(codec, per_fragment) + HEADER_NBYTES
    small = len(codec.encode(torch.randn(toy[0].numel), {}, toy[0].shapes).body) + HEADER_NBYTES
    state = num_parameters / sum(fragment.numel for fragment in toy)
    return {gather.PUSH: frame / small, gather.FETCH: frame / small, STATE: state}


def _body_nbytes(codec: Codec, numel: int) -> float:
    """Bytes of the body that ``numel`` Gaussian values make, as a matrix of up to 4 M of them."""
    columns = min(numel, 2048)
    rows = max(1, min(numel, SAMPLE) // columns)
    sample_N = torch.randn(rows * columns, generator=torch.Generator().manual_seed(0))
    return len(codec.encode(sample_N, {}, ((rows, columns),)).body) * (numel / (rows * columns))
