"""This peer's place among the members of its run: which part of the data is its own."""

from __future__ import annotations

from decentral.manifest import Manifest
from decentral.node.node import Node
from decentral.tasks.batches import ShardPlace
from decentral.wire.keys import PeerId


class Standing:
    """The place as of the last change of the membership."""

    def __init__(self, manifest: Manifest) -> None:
        self._steps = manifest.inner.steps // manifest.outer.fragments
        self._members: tuple[PeerId, ...] = ()
        self._place = ShardPlace()

    def place(self, node: Node) -> ShardPlace:
        """Where this peer stands now; one that no commit has let in yet counts itself."""
        members = tuple(sorted({*node.driver.head.members, node.driver.me}))
        if members != self._members:
            self._members = members
            rank, count = members.index(node.driver.me), len(members)
            self._place = ShardPlace(rank, count, self._steps * self._given(node, count))
        return self._place

    def _given(self, node: Node, count: int) -> int:
        """Contributions so far, of all peers; gossip commits none, but all make their steps."""
        return node.driver.head.contributions if node.gossip is None else node.gossip.step * count
