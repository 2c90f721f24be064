"""Pieces that only their owner can read, and that nobody can alter, mix or pass off as others: ChaCha20-Poly1305.

The key is made of the owner's own, the run, and a salt that is drawn for every state, so that a nonce (number of the
piece, number of the stripe) is used once. The label is part of what is sealed: a chunk of another piece, of another
place or of an older state does not open.

Source: Nir and Langley, "ChaCha20 and Poly1305 for IETF Protocols", RFC 8439.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from decentral.coding.erasure import joined, pieces_of
from decentral.errors import PayloadError
from decentral.redundancy.labels import Label
from decentral.wire.keys import Digest, Signer

_PURPOSE = b"decentral redundancy 1 "
_NONCE = struct.Struct("<IQ")  # piece, stripe
_OF_THE_LABEL = 2**64 - 1  # where a stripe's number stands for chunks


class Seals:
    """Of one owner in one run."""

    def __init__(self, signer: Signer, run: Digest) -> None:
        self._signer, self._run = signer, run
        self._cipher = lru_cache(maxsize=4)(self._made)

    def label(self, plan: Label, number: int) -> Label:
        """The one of piece ``number``, sealed."""
        made = replace(plan, number=number)
        cipher = self._cipher(plan.salt)
        return replace(made, seal=cipher.encrypt(_NONCE.pack(number, _OF_THE_LABEL), b"", made.fields))

    def is_ours(self, label: Label) -> bool:
        """Whether this peer wrote it, in this run."""
        try:
            nonce = _NONCE.pack(label.number, _OF_THE_LABEL)
            self._cipher(label.salt).decrypt(nonce, label.seal, label.fields)
        except InvalidTag:
            return False
        return True

    def chunks(self, plan: Label, stripe: int, state: memoryview) -> list[bytes]:
        """Those of a stripe, one for every piece; ``state`` is the whole."""
        row_B = np.zeros(plan.stripe_nbytes, np.uint8)  # what it is short of at the end is zeros
        part = state[stripe * plan.stripe_nbytes : (stripe + 1) * plan.stripe_nbytes]
        row_B[: len(part)] = np.frombuffer(part, np.uint8)
        piece_nW = pieces_of(row_B.reshape(plan.needed, plan.chunk_nbytes), plan.pieces)
        cipher, sealed = self._cipher(plan.salt), []
        for number, piece_W in enumerate(piece_nW):
            bound = replace(plan, number=number).fields
            sealed.append(cipher.encrypt(_NONCE.pack(number, stripe), piece_W.data, bound))
        return sealed

    def opened(self, label: Label, stripe: int, chunk: bytes) -> bytes:
        """A chunk as it was. Raises PayloadError for anything else than the very one."""
        try:
            return self._cipher(label.salt).decrypt(_NONCE.pack(label.number, stripe), chunk, label.fields)
        except InvalidTag:
            raise PayloadError(f"chunk {stripe} of {label}: not what was given to keep; ask another") from None

    def stripe(self, plan: Label, opened: Mapping[int, bytes]) -> memoryview:
        """A stripe of the state from ``needed`` opened chunks, by the numbers of their pieces."""
        rows = {number: np.frombuffer(chunk, np.uint8) for number, chunk in opened.items()}
        return joined(rows, plan.needed).reshape(-1).data

    def _made(self, salt: bytes) -> ChaCha20Poly1305:
        return ChaCha20Poly1305(self._signer.secret_for(_PURPOSE + self._run, salt))
