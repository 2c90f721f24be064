"""A peer's own state as one run of bytes, and back: a JSON document and tensors, safetensors without a file.

Layout: the document's length as u64, little-endian, the document, then a safetensors file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from decentral.errors import PayloadError

_LENGTH_NBYTES = 8

Json = Any  # what json.dumps takes: the caller's own document


def packed(tensors: Mapping[str, Tensor], document: Json) -> bytes:
    """One run of bytes; a copy."""
    head = json.dumps(document, allow_nan=False, separators=(",", ":")).encode()
    whole = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    return b"".join((len(head).to_bytes(_LENGTH_NBYTES, "little"), head, whole))


def unpacked(state: bytes) -> tuple[dict[str, Tensor], Json]:
    """What was packed. Raises PayloadError: then another version of this program packed it."""
    try:
        end = _LENGTH_NBYTES + int.from_bytes(state[:_LENGTH_NBYTES], "little")
        document = json.loads(state[_LENGTH_NBYTES:end])
        return dict(load(state[end:])), document
    except (ValueError, RecursionError, SafetensorError) as error:
        raise PayloadError(f"kept state does not decode ({type(error).__name__}); another version gave it") from error
