"""Tensor -> parts -> tensor. Pure, one method per file; error feedback is a wrapper.

One folder, one seam: `Compressor`. `parse_compressor` reads a spelling from a manifest, ``str()`` writes it.
"""

from decentral.compressors.base import Accumulator, Compressor, PartSpec, Payload, Sparsifier, accumulate
from decentral.compressors.chain import Chain
from decentral.compressors.dct import DCT
from decentral.compressors.e3m0 import E3M0
from decentral.compressors.feedback import Feedback, compress_with_debt, describe_feedback, feedback_of, parse_feedback
from decentral.compressors.half import BFloat16, Float16
from decentral.compressors.int8 import Int8
from decentral.compressors.none import Uncompressed
from decentral.compressors.powersgd import PowerSGD
from decentral.compressors.randk import RandK
from decentral.compressors.registry import describe_compressors, parse_compressor
from decentral.compressors.signmag2 import SignMag2
from decentral.compressors.threshold import Threshold
from decentral.compressors.topk import TopK

__all__ = [
    "DCT",
    "E3M0",
    "Accumulator",
    "BFloat16",
    "Chain",
    "Compressor",
    "Feedback",
    "Float16",
    "Int8",
    "PartSpec",
    "Payload",
    "PowerSGD",
    "RandK",
    "SignMag2",
    "Sparsifier",
    "Threshold",
    "TopK",
    "Uncompressed",
    "accumulate",
    "compress_with_debt",
    "describe_compressors",
    "describe_feedback",
    "feedback_of",
    "parse_compressor",
    "parse_feedback",
]
