"""Tensor -> parts -> tensor. Pure, one method per file; error feedback is a wrapper.

One folder, one seam: `Compressor`. `parse_compressor` reads a spelling from a manifest, ``str()`` writes it.
"""

from decentral.compressors.base import Accumulator, Compressor, PartSpec, Payload, Sparsifier, accumulate
from decentral.compressors.chain import Chain
from decentral.compressors.feedback import Feedback, compress_with_debt, describe_feedback, parse_feedback
from decentral.compressors.none import Uncompressed
from decentral.compressors.nothing import Nothing
from decentral.compressors.quantizers.codebook8 import Codebook8
from decentral.compressors.quantizers.e3m0 import E3M0
from decentral.compressors.quantizers.fp8 import FP8
from decentral.compressors.quantizers.half import BFloat16, Float16
from decentral.compressors.quantizers.int4 import Int4
from decentral.compressors.quantizers.int8 import Int8
from decentral.compressors.quantizers.natural import Natural
from decentral.compressors.quantizers.nf4 import NF4
from decentral.compressors.quantizers.qsgd import QSGD
from decentral.compressors.quantizers.sign import Sign
from decentral.compressors.quantizers.signmag2 import SignMag2
from decentral.compressors.quantizers.sparseloco2 import SparseLoCo2
from decentral.compressors.registry import describe_compressors, parse_compressor
from decentral.compressors.sparsifiers.dct import DCT
from decentral.compressors.sparsifiers.lowrank import LowRank
from decentral.compressors.sparsifiers.randk import RandK
from decentral.compressors.sparsifiers.threshold import Threshold
from decentral.compressors.sparsifiers.topk import TopK
from decentral.compressors.support import support

__all__ = [
    "DCT",
    "E3M0",
    "FP8",
    "NF4",
    "QSGD",
    "Accumulator",
    "BFloat16",
    "Chain",
    "Codebook8",
    "Compressor",
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
    "compress_with_debt",
    "describe_compressors",
    "describe_feedback",
    "parse_compressor",
    "parse_feedback",
    "support",
]
