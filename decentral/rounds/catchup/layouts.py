"""How large a snapshot may be, and which tensors it has: by this peer's own model, and the donor's word on senders.

What receivers keep of each sender is in a snapshot, and who has sent is not the same in every round. The index says it
beside the head: for each fragment a bit for each of the head's members, as hexadecimal digits, the first member lowest.
All names and sizes follow from that and the local schema. Members are a stranger's word here, and each one that is
claimed takes a copy of the model, so a snapshot that this machine cannot hold is refused before room is made for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psutil

from decentral.consensus.chain import Head
from decentral.errors import PayloadError
from decentral.replica.contents import sender_name
from decentral.replica.replica import Replica
from decentral.state.snapshot import CHUNK_NBYTES, HASH_NBYTES, Layout, SnapshotIndex
from decentral.wire.keys import PeerId

SENT = "senders"  # its name in the document of an index
_COPIES = 2  # as it comes, and as tensors


class Layouts:
    """Of the snapshots of one run."""

    def __init__(self, replica: Replica) -> None:
        self._senders = replica.senders
        own = replica.senders.tensors()
        self.least = Layout.of({name: one for name, one in replica.shared_tensors().items() if name not in own})

    @property
    def nbytes(self) -> int:
        """What a snapshot takes, as far as this peer knows who has sent."""
        return self.least.nbytes + self._senders.nbytes

    @property
    def longest_index(self) -> int:
        """Bytes that an index may have: the bound to read with."""
        most = SnapshotIndex.max_nbytes(self.least)
        return most + HASH_NBYTES * (_room() // CHUNK_NBYTES) if self._senders.names else most

    def of(self, meta: dict[str, Any], head: Head) -> Layout:  # Any: a JSON document
        """Of a snapshot with this document. Raises PayloadError."""
        if not self._senders.names:
            return self.least
        told = meta.get(SENT)
        if not isinstance(told, list) or len(told) != len(self._senders.sizes):
            raise PayloadError("snapshot that does not say, by fragment, of whom something is kept; use another donor")
        names, sizes = self._senders.names, self._senders.sizes
        entries = [
            (sender_name(f, peer, name), sizes[f])
            for f, digits in enumerate(told)
            for peer in _peers_of(digits, head.members)
            for name in names
        ]
        layout = Layout(tuple(sorted([*self.least.entries, *entries])))
        if layout.nbytes > _room():
            raise PayloadError(
                f"snapshot of {layout.nbytes / 1e9:.1f} GB, for it keeps what up to {len(head.members)} members sent; "
                f"this machine cannot hold {_COPIES} copies: use another donor, or a machine with more memory"
            )
        return layout

    def document(self, members: Sequence[PeerId]) -> dict[str, Any]:  # Any: a JSON document
        """What a donor's index says of senders."""
        if not self._senders.names:
            return {}
        fragments = range(len(self._senders.sizes))
        bits = [sum(1 << i for i, peer in enumerate(members) if self._senders.of(f, peer)) for f in fragments]
        return {SENT: [f"{number:x}" for number in bits]}


def _room() -> int:
    return int(psutil.virtual_memory().total) // _COPIES


def _peers_of(digits: object, members: Sequence[PeerId]) -> list[PeerId]:
    """The members whose bits are set, in one spelling only. Raises PayloadError."""
    known = isinstance(digits, str) and 0 < len(digits) <= len(members) and set(digits) <= set("0123456789abcdef")
    number = int(str(digits), 16) if known else -1
    if number < 0 or number >> len(members) or f"{number:x}" != digits:
        raise PayloadError("snapshot that keeps something of peers that are no members; use another donor")
    return [peer for i, peer in enumerate(members) if number >> i & 1]
