"""Tensors -> parts -> tensors. Pure, a file for each kind of method; error feedback is a wrapper.

The seam is `Compressor`. `parse_compressor` reads a spelling from a manifest, ``str()`` writes it.
"""

from decentral.compressors.base import (
    Compressor,
    Decoded,
    Nothing,
    PartSpec,
    Payload,
    Sparsifier,
    Uncompressed,
    accumulate,
)
from decentral.compressors.blockwise import E3M0, FP8, NF4, Int4, Int8, Sign
from decentral.compressors.chain import Chain
from decentral.compressors.codebook8 import Codebook8
from decentral.compressors.dct import DCT
from decentral.compressors.feedback import Feedback, describe_feedback, parse_feedback
from decentral.compressors.half import BFloat16, Float16
from decentral.compressors.lowrank import LowRank
from decentral.compressors.randk import RandK
from decentral.compressors.registry import describe_compressors, parse_compressor
from decentral.compressors.stochastic import QSGD, Natural
from decentral.compressors.threshold import Threshold
from decentral.compressors.topk import TopK
from decentral.compressors.two_bits import SignMag2, SparseLoCo2

__all__ = [
    "DCT",
    "E3M0",
    "FP8",
    "NF4",
    "QSGD",
    "BFloat16",
    "Chain",
    "Codebook8",
    "Compressor",
    "Decoded",
    "Feedback",
    "Float16",
    "Int4",
    "Int8",
    "LowRank",
    "Natural",
    "Nothing",
    "PartSpec",
    "Payload",
    "RandK",
    "Sign",
    "SignMag2",
    "SparseLoCo2",
    "Sparsifier",
    "Threshold",
    "TopK",
    "Uncompressed",
    "accumulate",
    "describe_compressors",
    "describe_feedback",
    "parse_compressor",
    "parse_feedback",
]
