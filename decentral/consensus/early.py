"""Messages of rounds that are yet to come here, kept until their round is open."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from decentral.wire.keys import PeerId
from decentral.wire.messages import Message

MOST_OF_STRANGERS = 32  # messages kept of peers that are no members yet: 32 MiB, were all the largest


class EarlyMessages:
    """The newest message of each kind by each peer."""

    def __init__(self) -> None:
        self._kept: dict[tuple[PeerId, str], Message] = {}

    def keep(self, sender: PeerId, message: Message, members: Collection[PeerId]) -> None:
        """Strangers may be members of the round it belongs to, but cost nothing to make: few of theirs fit."""
        kept = (sender, type(message).__name__)
        strangers = sum(peer not in members for peer, _ in self._kept)
        if sender in members or kept in self._kept or strangers < MOST_OF_STRANGERS:
            self._kept[kept] = message

    def take_all(self) -> list[tuple[PeerId, Message]]:
        """All of them, oldest first; none is left."""
        taken = list(self)
        self.clear()
        return taken

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()

    def __iter__(self) -> Iterator[tuple[PeerId, Message]]:
        return ((peer, message) for (peer, _), message in self._kept.items())
