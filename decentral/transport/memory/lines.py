"""The lines between all peers of a network in memory: what each way takes, and what a peer can send and receive."""

from __future__ import annotations

import random

import anyio

from decentral.transport.memory.pipe import Downlink, Link, Pipe, TimedPiece, Weight
from decentral.wire.keys import PeerId


class MemoryLines:
    """``latency`` is one way in seconds, ``bandwidth`` and ``downlink`` are bytes per second of each peer over all its
    streams (None: no limit), ``jitter`` is the largest extra delay of a piece in seconds, drawn from ``generator``.
    """

    def __init__(
        self,
        *,
        latency: float,
        bandwidth: float | None,
        downlink: float | None,
        jitter: float,
        generator: random.Random,
    ) -> None:
        self.latency, self.bandwidth, self._downlink_rate = latency, bandwidth, downlink
        self.jitter, self.generator = jitter, generator
        self._links: dict[tuple[PeerId, PeerId], Link] = {}
        self._uplinks: dict[PeerId, Link] = {}
        self._downlinks: dict[PeerId, Downlink] = {}

    def connect(self, sender: PeerId, receiver: PeerId, link: Link) -> None:
        """Give one direction between two peers a line of its own."""
        self._links[sender, receiver] = link

    def link(self, sender: PeerId, receiver: PeerId) -> Link:
        """What one direction between two peers goes by."""
        return self._links.get((sender, receiver)) or self.uplink(sender)

    def uplink(self, peer: PeerId) -> Link:
        """What a peer sends by, to all who have no line of their own with it."""
        if peer not in self._uplinks:
            self._uplinks[peer] = Link(latency=self.latency, bandwidth=self.bandwidth)
        return self._uplinks[peer]

    def downlink(self, peer: PeerId) -> Downlink:
        """What a peer receives by."""
        if peer not in self._downlinks:
            self._downlinks[peer] = Downlink(bandwidth=self._downlink_rate)
        return self._downlinks[peer]

    def pipe(self, sender: PeerId, receiver: PeerId, weight: Weight) -> Pipe:
        """A fresh one, one way."""
        return Pipe(self.link(sender, receiver), self.downlink(receiver), self._extra_delay, weight)

    def put(self, link: Link, receiver: PeerId, nbytes: float) -> TimedPiece:
        """A piece that leaves now."""
        now = anyio.current_time()
        piece = TimedPiece(memoryview(b""), nbytes, link.arrival(nbytes, now) + self._extra_delay())
        self.downlink(receiver).expect(piece, now)
        return piece

    def settle(self, receiver: PeerId, now: float) -> None:
        """Give what has reached a peer's line by now its turn."""
        self.downlink(receiver).settle(now)

    def _extra_delay(self) -> float:
        return self.generator.uniform(0.0, self.jitter) if self.jitter else 0.0
