"""The inner products of what frames hold: sparse where the codec says places, dense where it does not.

Of one tensor all contributions are looked at together: what is not sparse needs the memory of that tensor, times the
contributors, and no copy of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from decentral.compressors import Payload, support
from decentral.optimizers.aggregation.gram import Dense, Sparse, Values, gram
from decentral.optimizers.aggregation.sent import Floats
from decentral.replica.codec import Codec

# Shape suffixes: K = contributors, S = values of a tensor that are not zero.


def gram_of(codec: Codec, changes: Sequence[Sequence[Payload]]) -> Floats:
    """The inner products (K, K) of contributions, by their payloads, one for each tensor. Raises PayloadError."""
    return gram(_tensors(codec, changes), len(changes))


def _tensors(codec: Codec, changes: Sequence[Sequence[Payload]]) -> Iterator[list[Values]]:
    for payloads in zip(*changes, strict=True):
        yield [_values(codec, payload) for payload in payloads]


def _values(codec: Codec, payload: Payload) -> Values:
    found = support(codec.compressor, payload)
    if found is not None:
        place_S, value_S = found
        return Sparse(place_S.contiguous().numpy(), value_S.float().contiguous().numpy())
    (piece,) = codec.pieces([payload])
    return Dense(piece.contiguous().reshape(-1).numpy())
