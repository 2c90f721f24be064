"""An outer step: from a record's frames to means or rows of each channel, and with the method to the next anchor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from decentral.compressors import Payload
from decentral.compressors.feedback import Receiving, State
from decentral.consensus.chain import contributions
from decentral.errors import NonFiniteError
from decentral.optimizers import CHANGE, Aggregation, Channel, Contributor, OuterMethod, RoundInfo
from decentral.optimizers.aggregation.base import Floats, Sent
from decentral.optimizers.aggregation.gram import Dense, Sparse, Values, gram
from decentral.optimizers.base import Layout, Part, numel_of
from decentral.optimizers.mean import Adder, Bands, LazyMean, contribution_weights, mask, mean_of
from decentral.parameters import digest
from decentral.replica.codec import Codec
from decentral.replica.contents import FrameContents, Senders
from decentral.replica.measures import Measure, Sample
from decentral.replica.reduction import results_of
from decentral.replica.replica import OuterStep, Replica
from decentral.replica.weights import (
    NOBODY,
    OVERFLOW,
    Unusable,
    call,
    contributors_of,
    make_step,
    make_weights,
    row_of,
    scales_of,
)
from decentral.tensors.memory import fresh_zeros, values_of
from decentral.tensors.ops import float32, is_finite
from decentral.wire.frames import Frame, FrameKind
from decentral.wire.keys import PeerId
from decentral.wire.messages import FrameRef, Record

__all__ = [
    "Estimates",
    "GatherReader",
    "OpenedRecord",
    "combine",
    "gram_of",
    "nonzero_in_sample",
    "outer_step",
    "outside_of",
    "reader_of",
    "rebuilt",
    "round_info",
    "slice_state_weights",
    "slice_weights",
    "state_weights_of",
    "weights_of",
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
class Estimates:
    """The changes of contributions, estimated. Pure: what is kept of senders is not changed."""

    contents: FrameContents
    senders: Senders

    def sender_states(self, frames: Iterable[Frame]) -> tuple[dict[PeerId, State], dict[PeerId, Measure]]:
        """Return what there is to keep of their senders, and the measures of the estimates."""
        states: dict[PeerId, State] = {}
        measures: dict[PeerId, Measure] = {}
        for frame in frames:
            peer, receiving = frame.header.sender, self._receiving(frame)
            states[peer] = receiving.state
            measures[peer] = Measure.of([receiving.estimate_N], receiving.estimate_N.numel())
        return states, measures

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

    def sender_states(self, frames: Sequence[Frame]) -> tuple[dict[PeerId, State], dict[PeerId, Measure]]:
        """Return what every receiver keeps of these frames' senders, in their order, and what it measures of them."""
        return self._estimates.sender_states(frames) if self.senders.names else ({}, {})

    def combine_channels(
        self,
        frames: Sequence[Frame],
        due: Sequence[Channel],
        weights: Sequence[Sequence[float]],
        numel: int,
        seed: bytes,
        measured: Mapping[PeerId, Measure],
        sample: Sample,
        outside: Sequence[Part] = (),
    ) -> dict[str, Tensor]:
        """Return what came of each channel. ``weights``: what each frame counts in each channel; ``seed``: of the
        round; ``measured``: of estimates, where receivers remember;
        ``outside``: where the change of each frame counts nothing. The mean of the change is a `LazyMean` where
        the frames' contents are at hand.
        """
        whole = [1.0] * len(frames)
        scales = [self.scales(frames, weights[0], seed, measured), *[whole] * (len(due) - 1)]  # only of the change
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
        adders = [
            (frame.header.sender, partial(self.contents.band_adders, frame, scale), weight)
            for frame, scale, weight in zip(frames, scales, weights, strict=True)
        ]
        first = self.contents.channel(frames[0], 0)
        sizes = [(math.prod(one.shape), self.contents.codec.compressor.band(one.shape)) for one in first]
        return Bands(sizes, adders, lambda start, total_n: sample.of_part(total_n, start) != 0)

    def scales(
        self,
        frames: Sequence[Frame],
        weights: Sequence[float],
        seed: bytes,
        measured: Mapping[PeerId, Measure] | None = None,
    ) -> list[float]:
        """Return the scales of changes; ``seed``: of the round. Unusable when the rule gives nothing that fits."""
        needs, counted = self.rule.needs, sum(weight > 0 for weight in weights)
        if needs == "nothing" or (needs == "rows" and counted >= self.rule.least):
            return [1.0] * len(frames)
        if needs == "products" and counted >= self.rule.least:
            gram_KK = gram_of(self.contents.codec, [self.contents.channel(frame, 0) for frame in frames])
            return scales_of(self.rule, Sent.of_gram(gram_KK, weights, seed))
        norms = [measure.norm for measure in (measured.values() if measured else map(self.contents.measure, frames))]
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


# ---- how much each contributor counts, and where ----


def weights_of(replica: Replica, outer_step: int, told: Sequence[Contributor]) -> tuple[list[float], str]:
    """Return the weight of each in the mean of the changes of an outer step of the run, and why nothing moves where
    nobody counts.
    """
    given = contribution_weights(replica.weighting, [one.tokens for one in told])
    state = replica.states[outer_step % len(replica.anchors)]
    return make_weights(lambda: replica.method.weights(told, given, state), len(told))


def state_weights_of(
    replica: Replica, outer_step: int, told: Sequence[Contributor], weights: Sequence[float]
) -> list[tuple[list[float], str]]:
    """Return the same in the mean of each further channel that is due; ``weights``: in that of the changes."""
    state, summary = replica.states[outer_step % len(replica.anchors)], replica.method.summary
    places = range(len(replica.due(outer_step)) - 1)
    return [make_weights(partial(summary.state_weights, place, told, weights, state), len(told)) for place in places]


def outside_of(replica: Replica, outer_step: int, told: Sequence[Contributor]) -> list[Part]:
    """Return where the change of each counts nothing. Unusable where the method's answer does not fit."""
    layout = replica.schema.fragments[outer_step % len(replica.anchors)].layout
    numel, outside = numel_of(layout), replica.method.summary.outside
    found, why = call("outside", lambda: [[(int(a), int(b)) for a, b in outside(one, layout)] for one in told])
    if found is None or any(not 0 <= start <= stop <= numel for part in found for start, stop in part):
        raise Unusable(why or "outside gave ranges that are not in the fragment")
    return list(found)


# ---- the same in a reduce, where there are slices and no frames ----


def slice_weights(
    replica: Replica, contributors: Sequence[FrameRef], outer_step: int, parts: Sequence[float] | None = None
) -> list[float]:
    """Return the weight of each contributor of a plan. ``parts``: the norms of their slices, for the owner that sums
    them; others go by what contributors say.
    """
    measured = parts if replica.method.summary.measures else None
    told = contributors_of(contributors, outer_step, len(replica.anchors), parts=measured)
    return weights_of(replica, outer_step, told)[0]


def slice_state_weights(
    replica: Replica, contributors: Sequence[FrameRef], outer_step: int, weights: Sequence[float]
) -> list[list[float]]:
    """Return the weight of each in the mean of each further channel; ``weights``: in that of the changes."""
    told = contributors_of(contributors, outer_step, len(replica.anchors))
    return [counted for counted, _ in state_weights_of(replica, outer_step, told, weights)]


# ---- an outer step: a record, applied to a replica ----


@dataclass(frozen=True, slots=True)
class OpenedRecord:
    """A record with what its frames hold."""

    record: Record
    frames: Sequence[Frame]  # in the record's order
    bodies: Sequence[memoryview]  # theirs, without buffers
    decoded: Mapping[bytes, Tensor]  # what results are known to hold, by their frames' hashes
    told: Sequence[Contributor]
    kept: Mapping[PeerId, State]  # to keep of each sender, where receivers remember
    measures: Mapping[PeerId, Measure]  # of the estimates then


def outer_step(
    replica: Replica, record: Record, frames: Mapping[bytes, Frame], decoded: Mapping[bytes, Tensor] | None = None
) -> OuterStep:
    """Return what ``record`` makes of a replica. Pure: install it once the record is durable.

    ``decoded``: what results are known to hold, by their frames' hashes.
    Raises PayloadError when a frame does not decode; frames are checked when they arrive, so that is a bug or
    a damaged disk, and nothing has changed.
    """
    if any(frames[ref.frame].header.kind == FrameKind.MERGE for ref in record.frames):
        return _merge(replica, record, frames)
    opened, buffers_B = _open_record(replica, record, frames, decoded or {})
    weights, why = weights_of(replica, record.outer_step, opened.told)
    of_states = state_weights_of(replica, record.outer_step, opened.told, weights)
    info = round_info(replica, record, weights, opened.told)
    if why == NOBODY:
        return _nobody_counts(replica, info, opened)
    if why := why or next((why for _, why in of_states if why not in ("", NOBODY)), ""):
        return _stay(replica, opened, why)
    try:
        step = _step(replica, opened, info, [weights, *(counted for counted, _ in of_states)])
    except Unusable as error:
        return _stay(replica, opened, str(error))
    except NonFiniteError:  # finite contributions whose mean is not
        return _stay(replica, opened, OVERFLOW)
    return replace(step, buffers_B=buffers_B)


def round_info(
    replica: Replica, record: Record, weights: Sequence[float], told: Sequence[Contributor] | None = None
) -> RoundInfo:
    """Return what the method may know of the record's round; ``told``: of its contributors, where that is made."""
    step, fragments, fragment = record.outer_step, len(replica.anchors), replica.schema.fragments[record.fragment]
    told = contributors_of(contributions(record), step, fragments) if told is None else told
    members = len(record.members)
    return RoundInfo(step // fragments, tuple(told), tuple(weights), fragment.shapes, fragment.names, members)


def _open_record(
    replica: Replica, record: Record, frames: Mapping[bytes, Frame], decoded: Mapping[bytes, Tensor]
) -> tuple[OpenedRecord, Tensor | None]:
    """Return the record with what its frames hold, and the buffers after it."""
    bodies, buffers_B = replica.tail.read_record(record, frames, replica.buffers_B)
    named = [frames[ref.frame] for ref in record.frames]
    kept, measures = ({}, {}) if record.contributors else reader_of(replica).sender_states(named)
    norms = None
    if replica.method.summary.measures and not record.contributors:  # no peer need be believed that states its own
        norms = [measure.norm for measure in measures.values() or map(replica.contents.measure, named)]
    told = contributors_of(contributions(record), record.outer_step, len(replica.anchors), norms)
    return OpenedRecord(record, named, bodies, decoded, told, kept, measures), buffers_B


def reader_of(replica: Replica) -> GatherReader:
    """Return the reader of a gather's frames for a replica as it is now."""
    return GatherReader(replica.contents, replica.senders, replica.rule)


def _step(replica: Replica, opened: OpenedRecord, info: RoundInfo, weights: Sequence[Sequence[float]]) -> OuterStep:
    """Ask the method for the step along what came. Raises Unusable and NonFiniteError: then nothing moves."""
    f = opened.record.fragment
    anchor_N, state, sample = replica.anchors[f], replica.states[f], replica.samples[f]
    received = _combine_channels(replica, opened, weights)
    change = received.get(CHANGE.name)

    def is_known(made_N: Tensor) -> bool:
        stepped = change.stepped if isinstance(change, LazyMean) else None
        return stepped is not None and stepped.is_it(made_N)

    try:
        after_N, after = make_step(
            lambda: replica.method.outer_step(anchor_N, received, state, info), anchor_N, state, is_known
        )
    except Unusable:
        _check_mean(change)  # the method may have been given its error as it read it
        raise
    _check_mean(change)
    came_S = None if change is None else nonzero_in_sample(change, sample)
    return OuterStep(
        f, anchor_N, after_N, after, digest(after_N), None, opened.kept, opened.measures, frozenset(received), came_S
    )


def _check_mean(change: Tensor | None) -> None:
    if isinstance(change, LazyMean) and change.error is not None:
        raise change.error


def _combine_channels(replica: Replica, opened: OpenedRecord, weights: Sequence[Sequence[float]]) -> dict[str, Tensor]:
    """Return what came of each channel that is due, and in which somebody counts. ``weights``: of each channel.

    NonFiniteError when a contribution is not finite, Unusable when what the rule or the method gave cannot be used.
    """
    record, due = opened.record, replica.due(opened.record.outer_step)
    layout, numel = replica.schema.fragments[record.fragment].layout, replica.numel(record.fragment)
    if replica.method.summary.rebuilds:
        return rebuilt(replica.method, opened.told, layout, weights[0], due[0])
    if not record.contributors:
        outside, sample = outside_of(replica, record.outer_step, opened.told), replica.samples[record.fragment]
        return reader_of(replica).combine_channels(
            opened.frames, due, weights, numel, record.hash, opened.measures, sample, outside
        )
    mean_CN = results_of(record, opened.bodies, opened.decoded, replica.codec, numel, len(due))
    rows = zip(due, mean_CN, weights, strict=True)
    return {channel.name: mean_N for channel, mean_N, counted in rows if any(counted)}


def _nobody_counts(replica: Replica, info: RoundInfo, opened: OpenedRecord) -> OuterStep:
    anchor_N, state = replica.anchors[opened.record.fragment], replica.states[opened.record.fragment]
    try:
        _, after = make_step(lambda: (anchor_N, replica.method.nobody_counts(state, info)), anchor_N, state)
    except Unusable as error:
        return _stay(replica, opened, str(error))
    return replace(_stay(replica, opened, NOBODY), state=after)


def _stay(replica: Replica, opened: OpenedRecord, why: str) -> OuterStep:
    f = opened.record.fragment
    anchor_N, state, kept = replica.anchors[f], replica.states[f], (opened.kept, opened.measures)
    return OuterStep(f, anchor_N, anchor_N, state, replica.digests[f], None, *kept, unmoved=why)


def _merge(replica: Replica, record: Record, frames: Mapping[bytes, Frame]) -> OuterStep:
    """Make the one full average at the end of a gossip run.

    Source: "On the Surprising Effectiveness of a Single Global Merging in Decentralized Learning", 2025,
    arXiv:2507.06542.
    """
    f = record.fragment
    _, buffers_B = replica.tail.read_record(record, frames, replica.buffers_B)
    adders: list[Adder] = [
        (ref.peer, partial(replica.contents.add, frames[ref.frame], 0, 1.0), 1.0) for ref in record.frames
    ]
    after_N = mean_of(fresh_zeros(replica.numel(f)), adders)
    return OuterStep(f, replica.anchors[f], after_N, replica.states[f], digest(after_N), buffers_B)


def nonzero_in_sample(change: Tensor, sample: Sample) -> Tensor:
    """Return where in the sample something came of the change, bool (S,)."""
    if isinstance(change, LazyMean) and change.stepped is not None:
        return change.stepped.noted
    return sample.nonzero(values_of(change))
