"""The serving side: what other members gave this peer to keep. In memory only, bounded, given back to its owner alone.

Crosses the wire: to keep, the label of a piece, the number of a stripe and its sealed chunk, for one byte that says
whether it was taken; a label alone says that all keepers have what it is of, and that older pieces may go. To give
back, the labels of the whole pieces that are here of who asks, or one chunk.

Who asks is who the transport proved it to be. A keeper reads nothing of what it keeps, and need not be believed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import anyio

from decentral.errors import PayloadError
from decentral.manifest import Redundancy
from decentral.redundancy.pieces import CHUNK_NBYTES, LABEL_NBYTES, SEAL_NBYTES, Label
from decentral.transport import Transport
from decentral.transport.requests import serve_requests
from decentral.wire.keys import PeerId

KEEP = "/decentral/keep/1"
KEPT = "/decentral/kept/1"
TAKEN, FULL, REFUSED = b"\x00", b"\x01", b"\x02"
STRIPE = struct.Struct("<I")
PIECES_PER_OWNER = 2  # the newest that was settled, and the one that is on its way
KEPT_FOR = 86_400.0  # s after which its owner has given nothing newer: it is gone for good, or gives to others now
RENEWALS = 3  # that may be missed, where the terms have them further apart


@dataclass(slots=True)
class _Piece:
    label: Label
    chunks: dict[int, bytes] = field(default_factory=dict)
    is_settled: bool = False  # enough keepers have that state, as its owner said

    @property
    def is_whole(self) -> bool:
        return len(self.chunks) == self.label.stripes


@dataclass(slots=True)
class _Shelf:
    """The pieces of one owner, older ones first."""

    given: float  # s, when something of it was taken last
    pieces: list[_Piece] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(piece.label.piece_nbytes for piece in self.pieces)


class Keeper:
    """The keeping side of a peer: every piece counts as whole from its first chunk on."""

    def __init__(self, transport: Transport, terms: Redundancy, members: Callable[[], Collection[PeerId]]) -> None:
        self._terms, self._members = terms, members
        self._shelves: dict[PeerId, _Shelf] = {}
        serve_requests(transport, KEEP, self._on_keep, limit=LABEL_NBYTES + STRIPE.size + CHUNK_NBYTES + SEAL_NBYTES)
        serve_requests(transport, KEPT, self._on_kept, limit=LABEL_NBYTES + STRIPE.size)

    @property
    def nbytes(self) -> int:
        """Return the bytes that are held for others, or promised to them."""
        return sum(shelf.nbytes for shelf in self._shelves.values())

    @property
    def owners(self) -> list[PeerId]:
        """Return the peers whose pieces are here."""
        return sorted(self._shelves)

    def forget_old(self) -> None:
        """Drop what has not been renewed for a day."""
        oldest = anyio.current_time() - max(KEPT_FOR, RENEWALS * self._terms.seconds)
        for owner in [owner for owner, shelf in self._shelves.items() if shelf.given < oldest]:
            del self._shelves[owner]

    # ---- keeping ----

    async def _on_keep(self, peer: PeerId, data: bytes) -> bytes:
        label, rest = Label.read(data[:LABEL_NBYTES]), data[LABEL_NBYTES:]
        if peer not in self._members() or (label.pieces, label.needed) != (self._terms.keepers, self._terms.needed):
            return REFUSED
        if not rest:
            self._settle(peer, label)
            return TAKEN
        if len(rest) != STRIPE.size + label.chunk_nbytes + SEAL_NBYTES:
            raise PayloadError(f"chunk of {len(rest)} bytes of {label}; drop it")
        (stripe,) = STRIPE.unpack_from(rest)
        if stripe >= label.stripes:
            raise PayloadError(f"chunk {stripe} of {label}, which has {label.stripes}; drop it")
        piece = self._piece(peer, label) or self._new_piece(peer, label)
        if piece is None:
            return FULL
        piece.chunks[stripe] = rest[STRIPE.size :]
        self._shelves[peer].given = anyio.current_time()
        return TAKEN

    def _piece(self, peer: PeerId, label: Label) -> _Piece | None:
        shelf = self._shelves.get(peer)
        return next((piece for piece in shelf.pieces if piece.label == label), None) if shelf is not None else None

    def _new_piece(self, peer: PeerId, label: Label) -> _Piece | None:
        """Make a place for a piece beside the one that stays; None where there is no room.

        What stays is the settled one. A newer one may be whole here and at no other keeper: of two states that were not
        given to enough in turn, none can be had.
        """
        self.forget_old()
        shelf = self._shelves.get(peer) or _Shelf(anyio.current_time())
        whole = [piece for piece in shelf.pieces if piece.is_whole]
        stays = [piece for piece in whole if piece.is_settled] or whole[-1:]
        beside = sum(piece.label.piece_nbytes for piece in stays)
        if beside + label.piece_nbytes > self._terms.nbytes // self._terms.keepers:
            return None
        if not self._has_room(peer, beside + label.piece_nbytes):
            return None
        shelf.pieces = [*stays, _Piece(label)]
        self._shelves[peer] = shelf
        return shelf.pieces[-1]

    def _has_room(self, peer: PeerId, nbytes: int) -> bool:
        """Make room for so many bytes of ``peer`` in all, if it can: of peers that are no members the oldest go."""
        others = {owner: shelf for owner, shelf in self._shelves.items() if owner != peer}
        absent = sorted(others.keys() - set(self._members()), key=lambda owner: others[owner].given)
        while (held := sum(shelf.nbytes for shelf in others.values())) + nbytes > self._terms.nbytes and absent:
            del others[absent[0]], self._shelves[absent.pop(0)]
        return held + nbytes <= self._terms.nbytes

    def _settle(self, peer: PeerId, label: Label) -> None:
        """Drop the other pieces once all keepers have that state: they are of no use any more."""
        piece = self._piece(peer, label)
        if piece is not None and piece.is_whole:
            piece.is_settled = True
            self._shelves[peer].pieces = [piece]

    # ---- giving back ----

    async def _on_kept(self, peer: PeerId, data: bytes) -> bytes:
        """Answer with the labels, or a chunk, of the peer that asks; with nothing where nothing of it is here."""
        if not data:
            shelf = self._shelves.get(peer)
            whole = [piece for piece in shelf.pieces if piece.is_whole] if shelf is not None else []
            return b"".join(piece.label.to_bytes() for piece in whole)
        if len(data) != LABEL_NBYTES + STRIPE.size:
            raise PayloadError(f"question for a chunk of {len(data)} bytes; drop it")
        piece = self._piece(peer, Label.read(data[:LABEL_NBYTES]))
        (stripe,) = STRIPE.unpack_from(data, LABEL_NBYTES)
        return piece.chunks.get(stripe, b"") if piece is not None else b""
