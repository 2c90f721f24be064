"""The owner's half of a reduce: the sum of exactly the contributors' slices, compressed once.

Compressing a result loses something as compressing a slice does. Under feedback the owner owes it, in units of the
mean: it adds it to the next result that it makes of these elements (`decentral.replica.replica`).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import anyio
import torch
from torch import Tensor

from decentral.compressors.feedback import DEBT
from decentral.consensus.round_state import claims_match
from decentral.errors import NonFiniteError, PayloadError
from decentral.optimizers.aggregation.base import norm
from decentral.optimizers.base import Part
from decentral.optimizers.mean import Adder, mask, mean_of
from decentral.replica.codec import Codec, Encoded, range_shapes
from decentral.replica.contents import Tail
from decentral.replica.measures import Measure
from decentral.replica.weights import OVERFLOW
from decentral.tensors.device import PROCESSOR, to_device
from decentral.tensors.memory import fresh_zeros
from decentral.tensors.ops import float32
from decentral.wire.frames import Frame, Header
from decentral.wire.keys import Digest, PeerId
from decentral.wire.messages import FrameRef, Record, ReducePlan


@dataclass(slots=True)
class Reduction:
    """A part that this peer owns in a plan: collects slices, then makes the result."""

    plan: ReducePlan
    part: int
    slices: dict[PeerId, Tensor] = field(default_factory=dict)
    tails: dict[PeerId, Tensor] = field(default_factory=dict)  # the contributors' buffers, where the part has them
    unmoved: str = ""  # why the part's change is zeros, where contributors count; "": it is theirs

    @property
    def range(self) -> tuple[int, int]:
        """Return the elements owned, [start, stop)."""
        _, start, stop = self.plan.partition[self.part]
        return start, stop

    def missing(self) -> tuple[PeerId, ...]:
        """Return the contributors whose slice has not come."""
        return tuple(ref.peer for ref in self.plan.contributors if ref.peer not in self.slices)

    def contributor_buffers(self) -> list[Tensor]:
        """Return the buffers of exactly the plan's contributors, in peer order; nothing where the part carries none."""
        peers = sorted(ref.peer for ref in self.plan.contributors)
        return [self.tails[peer] for peer in peers if peer in self.tails]

    def result(
        self,
        codec: Codec,
        weights: Sequence[float],
        owed_N: Tensor | None = None,
        scales: Sequence[float] | None = None,
        beside: Sequence[Sequence[float]] = (),
        outside: Sequence[Part] = (),
    ) -> Encoded:
        """Make the mean over exactly the plan's contributors, each by its weight and scale, and this owner's residual
        of these elements, compressed once; `DEBT` in its feedback is what is owed after a commit that names it.

        ``beside``: the weights in each further channel; ``outside``: where in the fragment each one's change counts
        nothing. Where nobody counts nothing moves, whatever a result says: it
        is zeros, and what is owed stays owed.
        """
        if not any(weights):
            return self._of_nobody(codec, owed_N)
        whole, (start, stop) = [1.0] * len(weights), self.range
        mean_N = self._change(weights, whole if scales is None else scales, self._here(outside))
        states = [self._mean(1 + place, counted, whole) for place, counted in enumerate(beside)]
        owed = {} if owed_N is None else {DEBT: owed_N}
        try:
            return codec.for_results().encode(mean_N, owed, range_shapes(start, stop), states)
        except NonFiniteError:  # both are finite, and their sum is not: what is owed waits
            return self._of_nobody(codec, owed_N)

    def _here(self, outside: Sequence[Part]) -> list[Part]:
        """Return the same ranges, counted from where this part begins, as far as they are in it."""
        start, stop = self.range
        cut = [[(max(a, start) - start, min(b, stop) - start) for a, b in part] for part in outside]
        return [[(a, b) for a, b in part if a < b] for part in cut]

    def _change(self, weights: Sequence[float], scales: Sequence[float], outside: Sequence[Part]) -> Tensor:
        """Return the mean of the changes; zeros where a rule's scales make more than float32 holds of what each
        sent.
        """
        try:
            return self._mean(0, weights, scales, outside)
        except NonFiniteError:
            self.unmoved = OVERFLOW
            start, stop = self.range
            return fresh_zeros(stop - start)

    def _mean(
        self, channel: int, weights: Sequence[float], scales: Sequence[float], outside: Sequence[Part] = ()
    ) -> Tensor:
        """Return the mean of one channel; zeros where nobody counts in it."""
        start, stop = self.range
        total_N = fresh_zeros(stop - start)
        if not any(weights):
            return total_N
        peers = [ref.peer for ref in self.plan.contributors]
        rows = [self.slices[peer].view(-1, stop - start)[channel] for peer in peers]
        adders: list[Adder] = [
            (peer, partial(_add, row_N, scale), weight)
            for peer, row_N, weight, scale in zip(peers, rows, weights, scales, strict=True)
        ]
        return mean_of(total_N, mask(adders, outside))

    def _of_nobody(self, codec: Codec, owed_N: Tensor | None) -> Encoded:
        start, stop = self.range
        nothing_CN = torch.zeros_like(next(iter(self.slices.values()))).view(-1, stop - start)
        made = codec.for_results().encode(nothing_CN[0], {}, range_shapes(start, stop), list(nothing_CN[1:]))
        return made if owed_N is None else replace(made, feedback={DEBT: owed_N})


def _add(row_N: Tensor, scale: float, total_N: Tensor, weight: float) -> None:
    """Add ``weight * scale * row`` to ``total``."""
    total_N += row_N * (weight if scale == 1.0 else float32(weight * scale))


# ---- results that no mean can be ----
#
# A mean is no longer than the longest of what it is of. Nobody but its owner has that, but a contributor has its own
# slice of the same range, and the others' are about as long: whole updates of a clean run stayed within 1.11 times the
# median, and three times the learning rate made 2.7 (`decentral.observe.contributions`).

LONGEST = 8.0  # times this peer's own slice, for as many inner steps as are usual


def is_overlong(result_N: Tensor, own_N: Tensor, contributors: Sequence[FrameRef], me: PeerId) -> bool:
    """Tell whether the change that an owner's result says, (N,) of its range, is far longer than what this peer sent of
    it.

    ``own_N``: before compression; both on the processor. A peer with fewer inner steps than is usual has a shorter
    change, so its length is held against theirs as if it had made as many. False where this peer cannot tell: it is no
    contributor, or has no change there.
    """
    steps = {ref.peer: max(1, ref.steps) for ref in contributors}
    own = norm(own_N)
    if me not in steps or own == 0:
        return False
    usual = statistics.median_low(steps.values())
    return norm(result_N) > LONGEST * max(1.0, usual / steps[me]) * own


class Results:
    """Results as they decoded when they came, so that the outer step need not decode them again.

    Kept for the newest plan only, and one for each part: an owner that sends several fills no memory.
    """

    def __init__(self) -> None:
        self._plan = (0, 0)
        self._of_part: dict[int, tuple[bytes, Tensor]] = {}

    def add(self, frame: Frame, decoded: Tensor) -> None:
        """Remember a checked result."""
        header = frame.header
        plan = (header.round, header.plan)
        if plan > self._plan:
            self._plan, self._of_part = plan, {}
        if plan == self._plan:
            self._of_part.setdefault(header.part, (frame.hash, decoded))

    def by_frame(self) -> dict[bytes, Tensor]:
        """Return the results that are known, by their frames' hashes."""
        return dict(self._of_part.values())

    def forget(self) -> None:
        """Forget all: the round is over."""
        self._of_part = {}


# ---- slices that came ----
#
# They are kept as they come, for the owners of their parts.

PartKey = tuple[int, int, int]  # round, plan, part


class Slices:
    """The slices of one round, by round, plan and part, then by sender: one that was being decoded may be late."""

    def __init__(self, tail: Tail) -> None:
        self._tail = tail
        self._decoded: dict[PartKey, dict[PeerId, Tensor]] = {}
        self._buffers: dict[PartKey, dict[PeerId, Tensor]] = {}  # that came with them
        self._headers: dict[PartKey, dict[PeerId, Header]] = {}
        self.came = anyio.Event()  # replaced when the next one comes

    def add(self, frame: Frame, decoded: Tensor) -> None:
        """Take a checked slice."""
        key = (frame.header.round, frame.header.plan, frame.header.part)
        self._headers.setdefault(key, {})[frame.header.sender] = frame.header
        self._decoded.setdefault(key, {})[frame.header.sender] = decoded
        if (tail_B := self._tail.split(frame)[1]) is not None:
            self._buffers.setdefault(key, {})[frame.header.sender] = tail_B
        self.came.set()
        self.came = anyio.Event()

    def of(self, plan: ReducePlan, part: int) -> tuple[dict[PeerId, Tensor], dict[PeerId, Tensor]]:
        """Return what came of one part, and the buffers that came with it.

        A slice that its sender signed with other claims than the plan names is left out: the result would count it as
        what it is not.
        """
        key = (plan.round, plan.number, part)
        headers = self._headers.get(key, {})
        right = {ref.peer for ref in plan.contributors if ref.peer in headers and claims_match(headers[ref.peer], ref)}
        decoded, buffers = self._decoded.get(key, {}), self._buffers.get(key, {})
        return (
            {peer: slice_N for peer, slice_N in decoded.items() if peer in right},
            {peer: tail_B for peer, tail_B in buffers.items() if peer in right},
        )

    def forget(self) -> None:
        """Forget all: the round is over."""
        self._decoded, self._buffers, self._headers = {}, {}, {}


# ---- all of a round's reduces ----


class Sums:
    """The reduces of the round in progress, at one peer: all that came, and what its own results leave behind."""

    def __init__(self, tail: Tail) -> None:
        self.slices, self.results = Slices(tail), Results()
        self.left: dict[Digest, Tensor] = {}  # by results made here, what compressing each of them lost
        self.measured: dict[tuple[int, int], dict[PeerId, Measure]] = {}  # (round, plan) -> slices of a part of ours

    def forget(self) -> None:
        """Forget all: the round is over."""
        self.slices.forget()
        self.results.forget()
        self.left, self.measured = {}, {}

    def overlong(self, record: Record, own_N: Tensor, me: PeerId) -> frozenset[PeerId]:
        """Return the owners whose results, as ``record`` names them, are far longer than ``own_N`` in their range.

        ``own_N``: this peer's change before compression, over the whole fragment.
        """
        came = self.results.by_frame()
        if own_N.numel() == 0:
            return frozenset()
        named = zip(record.frames, record.partition, strict=True)
        return frozenset(
            owner
            for ref, (owner, start, stop) in named
            if owner != me
            and ref.frame in came
            and is_overlong(came[ref.frame], to_device(own_N[start:stop], PROCESSOR), record.contributors, me)
        )


def results_of(
    record: Record,
    bodies: Sequence[memoryview],
    decoded: Mapping[bytes, Tensor],
    codec: Codec,
    numel: int,
    channels: int,
) -> Tensor:
    """Return what the owners' results of a record say, (C, N). ``decoded``: what is known to be in some, by their
    frames.

    PayloadError when one does not decode, or parts are missing.
    """
    parts = {}
    for ref, data in zip(record.frames, bodies, strict=True):
        _, start, stop = record.partition[ref.part]
        known = decoded.get(ref.frame)
        if known is None:
            known = codec.decode(data, range_shapes(start, stop) * channels, channels)
        parts[ref.part] = known.view(channels, -1)
    if len(parts) != len(record.partition):
        raise PayloadError(f"round {record.round} names {len(parts)} of {len(record.partition)} partitions; drop it")
    return assemble(record.partition, parts, fresh_zeros(channels * numel).view(channels, -1))


def assemble(
    plan_partition: tuple[tuple[PeerId, int, int], ...], parts: Mapping[int, Tensor], out_CN: Tensor
) -> Tensor:
    """Lay the owners' decoded results, one row for each channel, into ``out_CN`` (float32) and return it."""
    for part, (_, start, stop) in enumerate(plan_partition):
        out_CN[:, start:stop] = parts[part]
    return out_CN
