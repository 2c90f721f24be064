"""How what a compressor loses is sent later. Pure, one mechanism per file; the caller books state on commit only.

One seam: `Feedback`. `parse_feedback` reads a spelling from a manifest, ``str()`` writes it.
"""

from decentral.compressors.feedback.base import Feedback, Receiving, Sending, State, add_sent, compress_flat
from decentral.compressors.feedback.dgc import DGC
from decentral.compressors.feedback.econtrol import EControl
from decentral.compressors.feedback.ef import ErrorFeedback, compress_with_debt
from decentral.compressors.feedback.ef21 import EF21
from decentral.compressors.feedback.none import NoFeedback
from decentral.compressors.feedback.registry import describe_feedback, parse_feedback

__all__ = [
    "DGC",
    "EF21",
    "EControl",
    "ErrorFeedback",
    "Feedback",
    "NoFeedback",
    "Receiving",
    "Sending",
    "State",
    "add_sent",
    "compress_flat",
    "compress_with_debt",
    "describe_feedback",
    "parse_feedback",
]
