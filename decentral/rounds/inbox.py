"""The check of every frame before anything else looks at it: right run, round, size, signature, finite values.

Sizes come from the local schema and the plan, never from the wire. A frame that fails raises PayloadError and
leaves no trace. Frames are of members, and one of each newcomer: keys cost nothing, and what they sign is kept for
nobody.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio
from torch import Tensor

from decentral.consensus.chain import Head
from decentral.errors import PayloadError
from decentral.flow.waiting import Changes, Offload, in_thread
from decentral.parameters import Schema
from decentral.replica.codec import Codec, FixedShapes, Shapes, range_shapes
from decentral.replica.contents import GATHERED, NO_TAIL, Payloads, Readings, Tail, Unpacked
from decentral.replica.measures import Measure
from decentral.wire.frames import Frame, FrameKind, Header, parse
from decentral.wire.keys import PeerId
from decentral.wire.messages import Record, ReducePlan

AHEAD = 2  # rounds a frame may be ahead of us: its sender may have seen a commit that we have not


class PlanUnknown(PayloadError):
    """A slice or result came before the plan that says how large it is."""


class Inbox:
    """The frames that come, checked by the plans of the round in progress."""

    def __init__(
        self,
        schema: Schema,
        codec: Codec,
        merge_codec: Codec,
        offload: Offload = in_thread,
        tail: Tail = NO_TAIL,
        channels: int = 1,
        unpacked: Unpacked | None = None,
        readings: Readings | None = None,
    ) -> None:
        """``channels``: the vectors that a contribution has at most; ``unpacked``: where the outer step looks;
        ``readings``: what other peers of this process have read, in a simulation.
        """
        self.channels = channels
        self._offload, self.tail = offload, tail
        self.unpacked, self.readings = unpacked or Unpacked(), readings
        self.schema, self.codec, self.merge_codec = schema, codec, merge_codec
        self.plans: dict[tuple[int, int], tuple[tuple[PeerId, int, int], ...]] = {}  # (round, plan) -> partition
        self._plan_came = Changes()
        self.admits: Callable[[PeerId], bool] = lambda newcomer: False  # a frame of a peer that is no member yet

    def expect(self, plan_or_record: ReducePlan | Record) -> None:
        """Learn the partition of a plan, so that its slices and results can be sized."""
        number = plan_or_record.number if isinstance(plan_or_record, ReducePlan) else plan_or_record.plan
        self.plans[(plan_or_record.round, number)] = plan_or_record.partition
        self._plan_came.tell()

    def forget_before(self, round_: int) -> None:
        """Drop the plans of rounds before ``round_``."""
        self.plans = {key: plan for key, plan in self.plans.items() if key[0] >= round_}

    async def take(
        self, data: bytes, head: Callable[[], Head], patience: Callable[[], float]
    ) -> tuple[Frame, Tensor | None]:
        """Check a frame as ``check`` does; wait up to ``patience`` seconds for the plan of a slice.

        A slice that is dropped comes from nobody else, and the plan may be behind many bytes of the leader's own.
        """
        deadline: float | None = None
        while True:
            came = self._plan_came.coming()
            try:
                return await self._offload(self.check, data, head())
            except PlanUnknown:
                deadline = anyio.current_time() + patience() if deadline is None else deadline
                with anyio.CancelScope(deadline=deadline) as wait:
                    await came.wait()
                if wait.cancelled_caught:
                    raise PlanUnknown("slice or result of a plan that never came; drop it") from None

    def check(self, data: bytes, head: Head) -> tuple[Frame, Tensor | None]:
        """Check a frame now; return it and what it decodes to, None where it is gathered and its parts are kept
        instead.

        Raises PlanUnknown when its plan has not come.
        """
        frame = parse(data, lambda header: self.max_nbytes(header, head))
        if frame.header.kind != FrameKind.SLICE:  # nobody asks for a slice by its hash
            _ = frame.hash  # kept in the frame: the event loop need not stop to hash megabytes
        body, _ = self.tail.split(frame)  # raises, too
        if frame.header.kind not in GATHERED:
            return frame, self.codec.decode(body, self.shapes_of(frame.header), frame.header.channels)
        if self.unpacked.get(frame) is None:  # pushed, and fetched besides
            self._unpack(frame, body, frame.header.sender in head.members)
        return frame, None

    def _unpack(self, frame: Frame, body: memoryview, keep: bool) -> None:
        """Read a gathered frame once: what is checked and measured is what the outer step adds."""
        known = None if self.readings is None else self.readings.get(frame.hash)
        payloads, measure = self._read(frame.header, body) if known is None else known
        if self.readings is not None and known is None:
            self.readings.add(frame.hash, payloads, measure)
        if measure is not None:
            self.unpacked.measures.add(frame.hash, measure)
        if keep:
            self.unpacked.add(frame, payloads)

    def _read(self, header: Header, body: memoryview) -> tuple[Payloads, Measure | None]:
        """Read what a body holds, checked, and the measure of a contribution. Raises PayloadError."""
        codec, shapes = self.codec_of(header), self._shapes_of_one(header)
        payloads = codec.unpack(body, shapes * header.channels, header.channels)
        if header.kind != FrameKind.CONTRIBUTION:
            codec.check(payloads)
            return payloads, None
        change, states = payloads[: len(shapes)], payloads[len(shapes) :]
        measure = Measure.of_payloads(codec, change)
        codec.of(1).check(states)
        return payloads, measure

    def shapes_of(self, header: Header) -> Shapes:
        """Return the shapes that a frame's body holds, by what this peer knows. Raises PayloadError."""
        if header.fragment >= len(self.schema.fragments):
            raise PayloadError(f"frame for fragment {header.fragment} of {len(self.schema.fragments)}; drop it")
        if header.channels > (1 if header.kind == FrameKind.MERGE else self.channels):
            raise PayloadError(f"{header.channels} channels in a {header.kind.name}, more than the method has; drop it")
        return self._shapes_of_one(header) * header.channels

    def _shapes_of_one(self, header: Header) -> FixedShapes:
        """Return the shapes of one channel."""
        shapes = self.codec.cut(self.schema.fragments[header.fragment])
        if header.kind in (FrameKind.CONTRIBUTION, FrameKind.MERGE, FrameKind.SWAP):
            return shapes
        partition = self.plans.get((header.round, header.plan))
        if partition is None:
            raise PlanUnknown(f"frame of plan {header.plan} in round {header.round}, which is not known here")
        if header.part >= len(partition) or header.parts != len(partition):
            raise PayloadError(f"frame for part {header.part} of {len(partition)}, as one of {header.parts}; drop it")
        if partition[-1][2] != self.schema.fragments[header.fragment].numel:
            raise PayloadError(f"plan {header.plan} does not cover fragment {header.fragment}; drop it and its frames")
        owner, start, stop = partition[header.part]
        if header.kind == FrameKind.RESULT and header.sender != owner:
            raise PayloadError(f"result of part {header.part} by a peer that does not own it; drop it")
        return range_shapes(start, stop)

    def codec_of(self, header: Header) -> Codec:
        """Return the codec of a frame: parameters merge uncompressed; everything else travels as the manifest says."""
        return self.merge_codec if header.kind == FrameKind.MERGE else self.codec

    def limit(self) -> int:
        """Return the bytes of the largest body that can be valid, over all fragments and kinds."""
        shapes = [self.codec.cut(fragment) for fragment in self.schema.fragments]
        sent = max(self.codec.max_body_nbytes(one * self.channels, self.channels) for one in shapes)
        return max(sent, *map(self.merge_codec.max_body_nbytes, shapes)) + self.tail.nbytes(0)

    def max_nbytes(self, header: Header, head: Head) -> int:
        """Return the bytes that the body of ``header`` may have. Raises PayloadError for one that belongs to nothing
        here.
        """
        if header.run != head.run:
            raise PayloadError(f"frame of run {header.run.hex()[:12]}, this is {head.run.hex()[:12]}; drop it")
        if header.kind != FrameKind.SWAP and not head.round < header.round <= head.round + AHEAD:
            raise PayloadError(f"frame of round {header.round} while round {head.round + 1} is open; drop it")
        if header.sender not in head.members and (header.kind == FrameKind.SLICE or not self.admits(header.sender)):
            raise PayloadError(f"{header.kind.name.lower()} of a peer that is no member; drop it")
        codec, shapes = self.codec_of(header), self.shapes_of(header)
        return codec.max_body_nbytes(shapes, header.channels) + self.tail.nbytes_of(header)
