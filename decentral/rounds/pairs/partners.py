"""What a gossiping peer hears of the others: their frames for steps near its own, and how far each of them is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio
from torch import Tensor

from decentral.consensus.chain import NOTHING, Head
from decentral.errors import PayloadError
from decentral.rounds.pairs.punctuality import Punctuality
from decentral.wire.frames import Frame
from decentral.wire.keys import PeerId

AHEAD = 8  # gossip steps a partner's frame may be ahead of ours


class Partners:
    """The others as one peer knows them, and its own step, which theirs are compared with."""

    def __init__(
        self, steps: int, num_fragments: int, channels: Callable[[int], int], punctuality: Punctuality, step: int = 0
    ) -> None:
        """``steps``: of the run; ``channels``: how many vectors a contribution to a gossip step has."""
        self.steps, self.num_fragments, self.channels, self.step = steps, num_fragments, channels, step
        self.punctuality = punctuality
        self._frames: dict[tuple[PeerId, int], tuple[Frame, Tensor]] = {}
        self._seen: dict[PeerId, int] = {}  # the latest step heard of from each member
        self._behind: dict[PeerId, int] = {}  # steps that each was behind this peer when it was last heard
        self._changed = anyio.Event()

    def take(self, frame: Frame, decoded: Tensor, head: Head) -> None:
        """A partner's checked frame came. Raises PayloadError for one that belongs to no step."""
        header = frame.header
        if header.sender not in head.members:
            raise PayloadError("swap of a peer that is no member; drop it")
        if header.round >= self.steps:
            raise PayloadError(f"gossip step {header.round} of a run of {self.steps}; drop the frame")
        if header.fragment != header.round % self.num_fragments:
            raise PayloadError(f"gossip step {header.round} is not of fragment {header.fragment}; drop the frame")
        if header.channels != self.channels(header.round):
            raise PayloadError(f"gossip step {header.round} with {header.channels} channels; drop the frame")
        self._seen[header.sender] = max(self.seen(header.sender), header.round)
        self._behind[header.sender] = self.step - header.round
        fits = self.step <= header.round <= self.step + AHEAD and header.base == NOTHING
        self.punctuality.came(header.round, header.sender, anyio.current_time(), is_over=not fits)
        if not fits:
            return  # a partner of a step that is over here: its commit is answered NO
        self._frames.setdefault((header.sender, header.round), (frame, decoded))
        self.wake()

    def frame(self, peer: PeerId, step: int) -> tuple[Frame, Tensor] | None:
        """The frame of ``peer`` for ``step`` and what it decodes to, if it came."""
        return self._frames.get((peer, step))

    def seen(self, peer: PeerId) -> int:
        """The latest step heard of from ``peer``."""
        return self._seen.get(peer, 0)

    async def changed(self) -> None:
        """Wait until something came, or ``wake`` is called."""
        await self._changed.wait()

    def wake(self) -> None:
        """Have all look again who wait for a change."""
        self._changed.set()
        self._changed = anyio.Event()

    def forget(self, step: int) -> None:
        """Steps up to ``step`` are over."""
        self._frames = {key: held for key, held in self._frames.items() if key[1] > step}

    # ---- where the others are ----

    def front(self, members: Sequence[PeerId]) -> int:
        """The step that the upper half of those heard of has reached.

        The median, so that one peer's claim moves nobody once three are known.
        """
        known = sorted([self.step, *(s for peer, s in self._seen.items() if peer in members)])
        return known[len(known) // 2]

    def lead(self, members: Sequence[PeerId]) -> int:
        """Steps that more than half of those heard of were behind, each when it was last heard.

        Not counted from where each was last: of a large swarm most were last heard long ago, while all went on.
        """
        behind = sorted([0, *(steps for peer, steps in self._behind.items() if peer in members)])
        return behind[(len(behind) - 1) // 2]

    def move(self, steps: int) -> None:
        """This peer goes so many steps forward, or back, to fall in with the others."""
        self.step += steps
        self._behind = {peer: behind + steps for peer, behind in self._behind.items()}
