"""The way from a record's frames to what the outer step takes: means or rows of each channel, or the next anchor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from decentral.compressors import Payload
from decentral.compressors.feedback import Receiving, State
from decentral.optimizers import Aggregation, Channel, Contributor, OuterMethod
from decentral.optimizers.aggregation.base import Floats, Sent
from decentral.optimizers.aggregation.gram import Dense, Sparse, Values, gram
from decentral.optimizers.base import Layout, Part, numel_of
from decentral.optimizers.mean import Adder, Bands, LazyMean, mask, mean_of
from decentral.parameters import Schema
from decentral.replica.codec import Codec
from decentral.replica.contents import FrameContents, Senders
from decentral.replica.measures import Measure, Sample
from decentral.replica.reduction import results_of
from decentral.replica.weights import Unusable, call, outside_of, row_of, scales_of
from decentral.tensors.memory import fresh_zeros, values_of
from decentral.tensors.ops import float32, is_finite
from decentral.wire.frames import Frame
from decentral.wire.keys import PeerId
from decentral.wire.messages import Record

__all__ = [
    "NOTHING_KEPT",
    "Estimates",
    "GatherReader",
    "KeptOfSenders",
    "OpenedRecord",
    "Reception",
    "combine",
    "gram_of",
    "nonzero_in_sample",
    "rebuilt",
]

# Shape suffixes: N = elements of one fragment, S = places of its sample, V = values of a tensor that are not zero,
# K = contributors; flat float32.

# ---- a mean of each channel, or a row of each contributor ----

# An adder adds one contributor's vector, and has its weight in this channel.
OfChannel = tuple[Channel, Sequence[Adder]]


def combine(channels: Sequence[OfChannel], numel: int, by_rows: Aggregation | None = None) -> dict[str, Tensor]:
    """Return what came, as the outer step takes it: by channel its weighted mean (N,), or the rows of all (K, N) in the
    order of their peers' ids; nothing of a mean in which nobody counts.

    Rows of all need K times a fragment's memory, so methods that can do with the mean ask for that. ``by_rows``: a rule
    that makes the first channel of rows, instead of a mean. Raises NonFiniteError when a contribution is not finite,
    Unusable when what the rule gave is none of its kind.
    """
    first, adders = channels[0]
    counted = [adder for adder in adders if adder[2] > 0]
    if by_rows is not None and len(counted) >= by_rows.least:
        made = {first.name: row_of(by_rows, _rows(counted, numel))}
        return made | combine(channels[1:], numel) if channels[1:] else made
    return {
        channel.name: mean_of(fresh_zeros(numel), adders) if channel.combine == "mean" else _rows(adders, numel)
        for channel, adders in channels
        if channel.combine == "each" or any(weight for _, _, weight in adders)
    }


def _rows(adders: Sequence[Adder], numel: int) -> Tensor:
    return torch.stack([_row(add, numel) for _, add, _ in sorted(adders, key=lambda adder: adder[0])])


def _row(add: Callable[..., None], numel: int) -> Tensor:
    row_N = fresh_zeros(numel)
    add(row_N, weight=1.0)
    return row_N


# ---- inner products of contributions ----
#
# Sparse where the codec says places, dense where it does not. Of one tensor all contributions are looked at together:
# what is not sparse needs the memory of that tensor, times the contributors, and no copy of the whole.


def gram_of(codec: Codec, changes: Sequence[Sequence[Payload]]) -> Floats:
    """The inner products (K, K) of contributions, by their payloads, one for each tensor. Raises PayloadError."""
    return gram(_tensors(codec, changes), len(changes))


def _tensors(codec: Codec, changes: Sequence[Sequence[Payload]]) -> Iterator[list[Values]]:
    for payloads in zip(*changes, strict=True):
        yield [_values(codec, payload) for payload in payloads]


def _values(codec: Codec, payload: Payload) -> Values:
    (decoded,) = codec.compressor.decompress([payload])
    found = decoded.support()
    if found is None:
        return Dense(decoded.tensor().float().contiguous().reshape(-1).numpy())
    place_V, value_V = found
    order_V = torch.argsort(place_V)  # chunks of a matrix are tiles: their places interleave
    return Sparse(place_V[order_V].numpy(), value_V[order_V].float().numpy())


# ---- changes of a method that sends none ----
#
# Each peer makes them of what contributors said. See `Summary.rebuilt`.


def rebuilt(
    method: OuterMethod, told: Sequence[Contributor], layout: Layout, weights: Sequence[float], channel: Channel
) -> dict[str, Tensor]:
    """Return what came, by the name of the channel: a mean by ``weights``. Unusable where the method gave no change."""
    pairs = zip(told, weights, strict=True)
    adders = [(one.peer, partial(_add_rebuilt, method, one, layout), weight) for one, weight in pairs]
    return combine([(channel, adders)], numel_of(layout))


def _add_rebuilt(method: OuterMethod, told: Contributor, layout: Layout, total_N: Tensor, weight: float) -> None:
    made_N, why = call("rebuilt", lambda: method.summary.rebuilt(told, layout))
    if made_N is None or why:
        raise Unusable(f"{method.name}: {why or 'rebuilt gave nothing'}")
    if (made_N.shape, made_N.dtype) != (total_N.shape, total_N.dtype):
        raise Unusable(f"{method.name}: rebuilt gave {made_N.dtype} {tuple(made_N.shape)}, want {tuple(total_N.shape)}")
    total_N += made_N * float32(weight)


# ---- changes where receivers remember ----
#
# A contributor's change is taken for what came, with what is kept of its sender.
#
# Under ef21 a frame holds how the sender's gradient differs from what it sent before, so a mean of frames would say
# nothing. The mean is that of the estimates of those whom the record names; who is absent is not in it, as ever. Norms
# that clip and warn are those of the estimates, too: a difference is long when its sender is new, and that is no
# fault.
#
# One member could end every round otherwise: the sum of two frames of values near 2e38 is beyond float32. Its sender
# is taken for new then, and starts anew as all hold it; a rule that clips sees one long estimate.
#
# One estimate is in memory at a time, beside what is kept. It is made twice: to measure and keep, then to add.


@dataclass(frozen=True, slots=True)
class KeptOfSenders:
    """The traces that a record's contributions leave with every receiver."""

    states: dict[PeerId, State] = field(default_factory=dict)  # to keep of each sender
    measures: dict[PeerId, Measure] = field(default_factory=dict)  # of the estimates


NOTHING_KEPT = KeptOfSenders()


@dataclass(frozen=True, slots=True)
class Estimates:
    """The changes of contributions, estimated. Pure: what is kept of senders is not changed."""

    contents: FrameContents
    senders: Senders

    def sender_states(self, frames: Iterable[Frame]) -> KeptOfSenders:
        """Return what there is to keep of their senders."""
        states: dict[PeerId, State] = {}
        measures: dict[PeerId, Measure] = {}
        for frame in frames:
            peer, receiving = frame.header.sender, self._receiving(frame)
            states[peer] = receiving.state
            measures[peer] = Measure.of([receiving.estimate_N], receiving.estimate_N.numel())
        return KeptOfSenders(states, measures)

    def add(self, frame: Frame, scale: float, total_N: Tensor, weight: float) -> None:
        """``total += weight * scale * change``."""
        total_N += self._receiving(frame).estimate_N * (weight if scale == 1.0 else float32(weight * scale))

    def _receiving(self, frame: Frame) -> Receiving:
        """A sender that has sent beyond float32 in all is taken for new: what came is finite, and the round goes on."""
        kept, feedback = self.senders.of(frame.header.fragment, frame.header.sender), self.contents.codec.feedback
        arrived_N = self.contents.change(frame)
        receiving = feedback.receive(arrived_N, kept)
        return receiving if is_finite(receiving.estimate_N) else feedback.receive(arrived_N, {})


# ---- the frames of a gather ----


@dataclass(frozen=True, slots=True)
class GatherReader:
    """Reads what the frames of a run's gathers bring. Pure: what is kept of senders is not changed."""

    contents: FrameContents
    senders: Senders
    rule: Aggregation

    def sender_states(self, frames: Sequence[Frame]) -> KeptOfSenders:
        """Return what every receiver keeps of these frames' senders, in their order."""
        return self._estimates.sender_states(frames) if self.senders.names else NOTHING_KEPT

    def combine_channels(
        self,
        frames: Sequence[Frame],
        due: Sequence[Channel],
        weights: Sequence[Sequence[float]],
        numel: int,
        seed: bytes,
        told: KeptOfSenders,
        sample: Sample,
        outside: Sequence[Part] = (),
    ) -> dict[str, Tensor]:
        """Return what came of each channel. ``weights``: what each frame counts in each channel; ``seed``: of the
        round; ``outside``: where the change of each frame counts nothing. The mean of the change is a `LazyMean` where
        the frames' contents are at hand.
        """
        whole = [1.0] * len(frames)
        scales = [self.scales(frames, weights[0], seed, told), *[whole] * (len(due) - 1)]  # only of the change
        channels = [
            (channel, self._adders(frames, place, scales[place], weights[place])) for place, channel in enumerate(due)
        ]
        channels[0] = (due[0], mask(channels[0][1], outside))
        rule = self.rule if self.rule.needs == "rows" else None
        by_rows = rule is not None and sum(weight > 0 for weight in weights[0]) >= rule.least
        is_plain = due[0].combine == "mean" and numel > 0 and not by_rows and not any(outside)
        bands = self._bands(frames, weights[0], scales[0], sample) if is_plain else None
        if bands is None:
            return combine(channels, numel, rule)
        adders = channels[0][1]
        change_N = LazyMean(lambda: mean_of(fresh_zeros(numel), adders), bands)
        return {due[0].name: change_N} | (combine(channels[1:], numel) if channels[1:] else {})

    def _bands(
        self, frames: Sequence[Frame], weights: Sequence[float], scales: Sequence[float], sample: Sample
    ) -> Bands | None:
        """The changes of the frames, tensor by tensor, and where in the sample their sum is not zero, bool (S,). None
        where receivers remember, or the contents of some frame are not at hand.
        """
        if self.senders.names or not all(self.contents.unpacked.get(frame) for frame in frames):
            return None
        changes = [self.contents.channel(frame, 0) for frame in frames]
        adders = [
            (frame.header.sender, partial(self.contents.band_adders, change, scale), weight)
            for frame, change, scale, weight in zip(frames, changes, scales, weights, strict=True)
        ]
        sizes = [(math.prod(one.shape), self.contents.codec.band(one.shape)) for one in changes[0]]
        return Bands(sizes, adders, lambda start, total_n: sample.of_part(total_n, start) != 0)

    def scales(
        self, frames: Sequence[Frame], weights: Sequence[float], seed: bytes, told: KeptOfSenders = NOTHING_KEPT
    ) -> list[float]:
        """Return the scales of changes; ``seed``: of the round. Unusable when the rule gives nothing that fits."""
        needs, counted = self.rule.needs, sum(weight > 0 for weight in weights)
        if needs == "nothing" or (needs == "rows" and counted >= self.rule.least):
            return [1.0] * len(frames)
        if needs == "products" and counted >= self.rule.least:
            gram_KK = gram_of(self.contents.codec, [self.contents.channel(frame, 0) for frame in frames])
            return scales_of(self.rule, Sent.of_gram(gram_KK, weights, seed))
        norms = [measure.norm for measure in told.measures.values() or map(self.contents.measure, frames)]
        return scales_of(self.rule, Sent.of_norms(norms, weights, seed))

    def _adders(
        self, frames: Sequence[Frame], place: int, scales: Sequence[float], weights: Sequence[float]
    ) -> list[Adder]:
        remembers = self.senders.names and place == 0
        add = self._estimates.add if remembers else partial(self._add, place)
        return [
            (frame.header.sender, partial(add, frame, scale), weight)
            for frame, scale, weight in zip(frames, scales, weights, strict=True)
        ]

    def _add(self, place: int, frame: Frame, scale: float, total_N: Tensor, weight: float) -> None:
        self.contents.add(frame, place, scale, total_N, weight)

    @property
    def _estimates(self) -> Estimates:
        return Estimates(self.contents, self.senders)


# ---- the frames of any record ----


@dataclass(frozen=True, slots=True)
class OpenedRecord:
    """A record with what its frames hold."""

    record: Record
    frames: Sequence[Frame]  # in the record's order
    bodies: Sequence[memoryview]  # theirs, without buffers
    decoded: Mapping[bytes, Tensor]  # what results are known to hold, by their frames' hashes
    told: Sequence[Contributor]
    kept: KeptOfSenders


@dataclass(frozen=True, slots=True)
class Reception:
    """The reader of the records of one run, gathers, reduces and summaries alike. Pure."""

    schema: Schema
    method: OuterMethod
    codec: Codec
    gathering: GatherReader

    def combine_channels(
        self, opened: OpenedRecord, due: Sequence[Channel], weights: Sequence[Sequence[float]], sample: Sample
    ) -> dict[str, Tensor]:
        """Return what came of each channel that is due, and in which somebody counts. ``weights``: of each channel.

        NonFiniteError when a contribution is not finite, Unusable when what the rule or the method gave cannot be used.
        """
        record, layout = opened.record, self.schema.fragments[opened.record.fragment].layout
        if self.method.summary.rebuilds:
            return rebuilt(self.method, opened.told, layout, weights[0], due[0])
        numel = self.schema.fragments[record.fragment].numel
        if not record.contributors:
            outside = outside_of(self.method, opened.told, layout)
            kept = opened.kept
            return self.gathering.combine_channels(
                opened.frames, due, weights, numel, record.hash, kept, sample, outside
            )
        mean_CN = results_of(record, opened.bodies, opened.decoded, self.codec, numel, len(due))
        rows = zip(due, mean_CN, weights, strict=True)
        return {channel.name: mean_N for channel, mean_N, counted in rows if any(counted)}


def nonzero_in_sample(change: Tensor, sample: Sample) -> Tensor:
    """Return where in the sample something came of the change, bool (S,)."""
    if isinstance(change, LazyMean) and change.noted is not None:
        return change.noted
    return sample.nonzero(values_of(change))
