"""The codec of a run's contributions, as its manifest says: the chain, its feedback, and what compresses the states."""

from __future__ import annotations

from decentral.compressors import Nothing, parse_compressor, parse_feedback
from decentral.manifest import Manifest
from decentral.optimizers import compressor_beside, make_outer
from decentral.replica.codec import Codec


def codec_of(manifest: Manifest) -> Codec:
    """Channels whose own compressor is the run's are in one section with the change, as those that have none."""
    method = make_outer(manifest.outer.method, manifest.outer.hyper)
    if method.rebuilds:
        return Codec(Nothing())
    chain = parse_compressor(manifest.compressor.chain)
    own = compressor_beside(method.channels())
    beside = chain if own is None else parse_compressor(own)
    feedback = parse_feedback(manifest.compressor.feedback)
    return Codec(chain, feedback, None if str(beside) == str(chain) else beside)
