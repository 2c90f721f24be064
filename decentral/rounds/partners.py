"""Partners of a gossiping peer: who meets whom, their frames for steps near its own, and how long to wait for them."""

from __future__ import annotations

import hashlib
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import anyio
from torch import Tensor

from decentral.consensus.chain import NOTHING, Head
from decentral.consensus.timing import ENOUGH, SPREAD, WINDOW
from decentral.dissemination.reassembly import MaxNbytes, Reassembly
from decentral.errors import PayloadError
from decentral.wire.frames import HEADER_NBYTES, Frame, FrameKind, Header
from decentral.wire.keys import PeerId
from decentral.wire.pieces import PIECE_HEAD_NBYTES, Piece, read_piece

__all__ = [
    "AHEAD",
    "HELD_UP",
    "LANE",
    "LANES",
    "LANE_NBYTES",
    "LATEST",
    "Lanes",
    "Partners",
    "Punctuality",
    "cut",
    "partner_of",
]

# ---- frames and steps of the others ----

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
        """Take a partner's checked frame. Raises PayloadError for one that belongs to no step."""
        header = frame.header
        self.check(header, head)
        self._seen[header.sender] = max(self.seen(header.sender), header.round)
        self._behind[header.sender] = self.step - header.round
        fits = self.step <= header.round <= self.step + AHEAD and header.base == NOTHING
        self.punctuality.came(header.round, header.sender, anyio.current_time(), is_over=not fits)
        if not fits:
            return  # a partner of a step that is over here: its commit is answered NO
        self._frames.setdefault((header.sender, header.round), (frame, decoded))
        self.wake()

    def check(self, header: Header, head: Head) -> None:
        """Raise PayloadError unless a frame with this header is a member's, of some step of the run."""
        if header.sender not in head.members:
            raise PayloadError("swap of a peer that is no member; drop it")
        if header.round >= self.steps:
            raise PayloadError(f"gossip step {header.round} of a run of {self.steps}; drop the frame")
        if header.fragment != header.round % self.num_fragments:
            raise PayloadError(f"gossip step {header.round} is not of fragment {header.fragment}; drop the frame")
        if header.channels != self.channels(header.round):
            raise PayloadError(f"gossip step {header.round} with {header.channels} channels; drop the frame")

    def frame(self, peer: PeerId, step: int) -> tuple[Frame, Tensor] | None:
        """Return the frame of ``peer`` for ``step`` and what it decodes to, if it came."""
        return self._frames.get((peer, step))

    def seen(self, peer: PeerId) -> int:
        """Return the latest step heard of from ``peer``."""
        return self._seen.get(peer, 0)

    async def changed(self) -> None:
        """Wait until something came, or ``wake`` is called."""
        await self._changed.wait()

    def wake(self) -> None:
        """Have all look again who wait for a change."""
        self._changed.set()
        self._changed = anyio.Event()

    def forget(self, step: int) -> None:
        """Forget the frames of steps up to ``step``, which are over."""
        self._frames = {key: held for key, held in self._frames.items() if key[1] > step}

    # ---- where the others are ----

    def front(self, members: Sequence[PeerId]) -> int:
        """Return the step that the upper half of those heard of has reached.

        The median, so that one peer's claim moves nobody once three are known.
        """
        known = sorted([self.step, *(s for peer, s in self._seen.items() if peer in members)])
        return known[len(known) // 2]

    def lead(self, members: Sequence[PeerId]) -> int:
        """Return the steps that more than half of those heard of were behind, each when it was last heard.

        Not counted from where each was last: of a large swarm most were last heard long ago, while all went on.
        """
        behind = sorted([0, *(steps for peer, steps in self._behind.items() if peer in members)])
        return behind[(len(behind) - 1) // 2]

    def move(self, steps: int) -> None:
        """Move so many steps forward, or back, to fall in with the others."""
        self.step += steps
        self._behind = {peer: behind + steps for peer, behind in self._behind.items()}


# ---- a frame on several streams at once ----
#
# The muxers of libp2p give a new stream a window of 256 KiB and let its sender go on when half of it was read; what
# says so waits behind all that the reader itself sends on the same connection. Two that send each other one stream
# stand still in turns, the longer the farther they are apart. Of several streams some always may go on.

LANE = "/decentral/lane/1"
LANES = 16  # streams of a frame: with four, two peers took no less than with one
WIDE = 1 << 18  # bytes of a frame that goes so: a smaller one fits into the first window of a stream
LANE_PIECE = 1 << 17  # bytes: what a stream takes at a time
LANE_NBYTES = PIECE_HEAD_NBYTES + LANE_PIECE  # of the longest piece


def cut(frame: Frame) -> Iterator[bytes]:
    """Yield the pieces of a frame, each as it goes on whichever stream is free."""
    head = frame.data[:HEADER_NBYTES]
    for at in range(0, frame.nbytes, LANE_PIECE):
        yield Piece(head, frame.nbytes, at, False, frame.data[at : at + LANE_PIECE]).to_bytes()


class Lanes:
    """The frames of partners that come on several streams: of each sender one, its newest."""

    def __init__(self, max_nbytes: MaxNbytes) -> None:
        """``max_nbytes``: of a body; raises PayloadError for a header that belongs to nothing here."""
        self._max_nbytes = max_nbytes
        self._coming: dict[PeerId, tuple[int, Reassembly]] = {}  # of which step

    def add(self, data: bytes, peer: PeerId) -> bytes | None:
        """Add a piece that ``peer`` sent; return the frame when it is whole. Raises PayloadError."""
        piece = read_piece(data)
        header = piece.header
        if header.kind != FrameKind.SWAP or header.sender != peer:
            raise PayloadError("piece of what is no swap of its sender's; drop it")
        step, coming = self._coming.get(peer, (-1, None))
        if coming is None or step != header.round:
            coming = Reassembly(self._max_nbytes)
        _, whole = coming.add(piece, peer)
        self._coming[peer] = header.round, coming
        if whole is not None:
            del self._coming[peer]
        return whole

    def forget(self, step: int) -> None:
        """Forget the frames of steps up to ``step``, which are over."""
        self._coming = {peer: held for peer, held in self._coming.items() if held[0] > step}


# ---- how long to wait for a partner ----
#
# Learned from when partners come, those that came too late included:
#
# wait = median + max(floor, SPREAD * MAD) of (the partner's frame here - own step begun), below 0 for who was first
#
# Learned from the pairs that were made alone, it came down to the floor: whoever was later than that was no pair and
# was not counted, and peers that had drifted apart by more than the floor met by chance alone. Nothing crosses the wire
# for it.

HELD_UP = 4.0  # s that one lost answer may keep a leader that has both frames from asking: it asks again after 2
LATEST = 8  # steps for which a partner's frame may be late and still tell by how much


class Punctuality:
    """The times at which partners come, on one clock. Each step counts once, and only its own partner can be late."""

    def __init__(self, floor: float, ceiling: float) -> None:
        self.floor, self.ceiling = floor, ceiling  # s: the least slack, the longest wait
        self._delays: deque[float] = deque(maxlen=WINDOW)
        self._early: dict[tuple[int, PeerId], float] = {}  # when frames came for steps that have not begun
        self._begun: dict[int, tuple[PeerId, float]] = {}  # steps whose partner's frame has not come: whose, and since

    def began(self, step: int, partner: PeerId, now: float) -> None:
        """Note that this peer is at ``step``, where it meets ``partner``."""
        early = self._early.pop((step, partner), None)
        if early is None:
            self._begun[step] = (partner, now)
        else:
            self._delays.append(early - now)
        self._early = {key: when for key, when in self._early.items() if key[0] > step}
        self._begun = {begun: one for begun, one in self._begun.items() if step - LATEST < begun <= step}

    def came(self, step: int, peer: PeerId, now: float, *, is_over: bool) -> None:
        """Note a frame of ``peer`` for ``step``; ``is_over``: it is of no use any more."""
        partner, begun = self._begun.get(step, (None, 0.0))
        if partner == peer:
            del self._begun[step]
            self._delays.append(now - begun)
        elif partner is None and not is_over:
            self._early.setdefault((step, peer), now)

    def patience(self) -> float:
        """Return the seconds to wait for the partner of a step that begins now, beyond what its frame takes on the
        way.
        """
        if len(self._delays) < ENOUGH:
            return self.ceiling
        median = statistics.median(self._delays)
        spread = statistics.median(abs(delay - median) for delay in self._delays)
        return min(self.ceiling, max(self.floor, median + max(self.floor, SPREAD * spread)))


# ---- pairs of gossip ----
#
# A fresh random matching of the members for every gossip step, without a message: every peer sorts the members by a
# hash of (run, step, peer) and pairs neighbours; with an odd number one is left over and takes its step alone.


def matching(run: bytes, step: int, members: Sequence[PeerId]) -> list[tuple[PeerId, ...]]:
    """Return disjoint pairs that cover ``members``; the last group holds one peer when their number is odd."""
    salt = b"pair" + run + step.to_bytes(8, "little")
    order = sorted(members, key=lambda peer: hashlib.blake2b(salt + peer, digest_size=16).digest())
    return [tuple(sorted(order[at : at + 2])) for at in range(0, len(order), 2)]


def partner_of(run: bytes, step: int, members: Sequence[PeerId], me: PeerId) -> PeerId | None:
    """Return the peer that ``me`` swaps with at ``step``, or None when it is left over."""
    for group in matching(run, step, members):
        if me in group:
            return next((peer for peer in group if peer != me), None)
    return None
