"""A peer's own state as one run of bytes, and back: a safetensors file in memory, with a JSON document in its header.

Format: safetensors 0.x, https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from decentral.errors import PayloadError

_LENGTH_NBYTES = 8  # of the header's length, which a file begins with
_DOCUMENT = "document"

Json = Any  # what json.dumps takes: the caller's own document


def packed(tensors: Mapping[str, Tensor], document: Json) -> bytes:
    """One run of bytes; a copy."""
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    made: bytes = save({name: tensor.contiguous() for name, tensor in tensors.items()}, {_DOCUMENT: text})
    return made


def unpacked(state: bytes) -> tuple[dict[str, Tensor], Json]:
    """What was packed. Raises PayloadError: then another version of this program packed it."""
    try:
        end = _LENGTH_NBYTES + int.from_bytes(state[:_LENGTH_NBYTES], "little")
        document = json.loads(json.loads(state[_LENGTH_NBYTES:end])["__metadata__"][_DOCUMENT])
        return dict(load(state)), document
    except (ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
        raise PayloadError(f"kept state does not decode ({type(error).__name__}); another version gave it") from error
