"""How the frames of a gather become what the outer step receives: one vector of each channel, or a row of each peer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from decentral.optimizers import Aggregation, Channel
from decentral.optimizers.aggregation.mean import Adder, masked
from decentral.optimizers.aggregation.sent import Sent
from decentral.optimizers.base import Part
from decentral.optimizers.piecewise import minus_mean
from decentral.replica.received.combining import combined
from decentral.replica.received.estimates import NOTHING_KEPT, Estimates, KeptOfSenders
from decentral.replica.received.frame_contents import FrameContents
from decentral.replica.received.inner_products import gram_of
from decentral.replica.received.sample import Sample
from decentral.replica.received.senders import Senders
from decentral.replica.rule_output import scales_of
from decentral.wire.frames import Frame


@dataclass(frozen=True, slots=True)
class GatherReader:
    """Of one run. Pure: what is kept of senders is not changed."""

    contents: FrameContents
    senders: Senders
    rule: Aggregation

    def told(self, frames: Sequence[Frame]) -> KeptOfSenders:
        """What every receiver keeps of these frames' senders, in their order."""
        return self._estimates.told(frames) if self.senders.names else NOTHING_KEPT

    def received(
        self,
        frames: Sequence[Frame],
        due: Sequence[Channel],
        weights: Sequence[Sequence[float]],
        numel: int,
        seed: bytes,
        told: KeptOfSenders,
        outside: Sequence[Part] = (),
    ) -> dict[str, Tensor]:
        """By channel what came of it. ``weights``: what each frame counts in each channel; ``seed``: of the round;
        ``outside``: where the change of each frame counts nothing.
        """
        whole = [1.0] * len(frames)
        scales = [self.scales(frames, weights[0], seed, told), *[whole] * (len(due) - 1)]  # only of the change
        channels = [
            (channel, self._adders(frames, place, scales[place], weights[place])) for place, channel in enumerate(due)
        ]
        channels[0] = (due[0], masked(channels[0][1], outside))
        return combined(channels, numel, self.rule if self.rule.needs == "rows" else None)

    def moved(
        self,
        frames: Sequence[Frame],
        weights: Sequence[float],
        seed: bytes,
        step: tuple[Tensor, float],
        sample: Sample,
    ) -> tuple[Tensor, Tensor] | None:
        """``anchor - mean * rate``, of the two in ``step``, and where in the sample something came, bool (S,).

        None where receivers remember, a rule wants rows, the contents of some frame are not at hand, or what comes of
        it is beyond float32. Raises Unusable.
        """
        held = [self.contents.unpacked.get(frame) for frame in frames]
        by_rows = self.rule.needs == "rows" and sum(weight > 0 for weight in weights) >= self.rule.least
        anchor_N, rate = step
        if self.senders.names or by_rows or not len(anchor_N) or not all(held):
            return None
        pairs = zip(frames, held, self.scales(frames, weights, seed), weights, strict=True)
        adders = [
            (frame.header.sender, partial(self.contents.opened, payloads or (), scale), weight)
            for frame, payloads, scale, weight in pairs
        ]
        sizes = [(math.prod(one.shape), self.contents.codec.band(one.shape)) for one in held[0] or ()]
        came = dict[int, Tensor]()
        made_N = minus_mean(
            anchor_N, sizes, adders, rate, lambda at, total: came.update({at: sample.of_part(total, at) != 0})
        )
        return None if made_N is None else (made_N, torch.cat([came[at] for at in sorted(came)]))

    def scales(
        self, frames: Sequence[Frame], weights: Sequence[float], seed: bytes, told: KeptOfSenders = NOTHING_KEPT
    ) -> list[float]:
        """What changes are multiplied by; ``seed``: of the round. Unusable when the rule gives nothing that fits."""
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
