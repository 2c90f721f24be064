"""What the frames of a record become: one vector of each channel, or a row of each peer.

Or the next anchor itself, where an outer step is that simple.
"""
# Shape suffixes: N = elements of one fragment, S = places of its sample; flat float32.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from decentral.optimizers import Channel, Contributor, OuterMethod, RoundInfo
from decentral.parameters import Schema
from decentral.replica.codec import Codec
from decentral.replica.method_output import attempted
from decentral.replica.rebuilt import rebuilt
from decentral.replica.received.estimates import KeptOfSenders
from decentral.replica.received.gathering import GatherReader
from decentral.replica.received.sample import Sample
from decentral.replica.reduction import results_of
from decentral.replica.weighing import outside_of
from decentral.tensors.ops import float32
from decentral.wire.frames import Frame
from decentral.wire.messages import Record


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
    """Of one run. Pure."""

    schema: Schema
    method: OuterMethod
    codec: Codec
    gathering: GatherReader

    def received(
        self, opened: OpenedRecord, due: Sequence[Channel], weights: Sequence[Sequence[float]]
    ) -> dict[str, Tensor]:
        """What came of each channel that is due, and in which somebody counts. ``weights``: of each channel.

        NonFiniteError when a contribution is not finite, Unusable when what the rule or the method gave cannot be used.
        """
        record, layout = opened.record, self.schema.fragments[opened.record.fragment].layout
        if self.method.rebuilds:
            return rebuilt(self.method, opened.told, layout, weights[0], due[0])
        numel = self.schema.fragments[record.fragment].numel
        if not record.contributors:
            outside = outside_of(self.method, opened.told, layout)
            return self.gathering.received(opened.frames, due, weights, numel, record.hash, opened.kept, outside)
        mean_CN = results_of(record, opened.bodies, opened.decoded, self.codec, numel, len(due))
        rows = zip(due, mean_CN, weights, strict=True)
        return {channel.name: mean_N for channel, mean_N, counted in rows if any(counted)}

    def moved(
        self, opened: OpenedRecord, due: Sequence[Channel], info: RoundInfo, anchor_N: Tensor, sample: Sample
    ) -> tuple[Tensor, Tensor] | None:
        """The anchor after a gather whose outer step is ``anchor - mean * rate``, and where in the sample something
        came, bool (S,). None: it is more, or the frames' contents are not all at hand, or what comes of it is beyond
        float32; `received` and the method tell then. Raises Unusable.
        """
        record, method = opened.record, self.method
        if record.contributors or method.rebuilds or method.divides or len(due) > 1 or due[0].combine != "mean":
            return None
        rate = _rate(method, info)
        if rate is None:
            return None
        return self.gathering.moved(opened.frames, info.weights, record.hash, (anchor_N, rate), sample)


def _rate(method: OuterMethod, info: RoundInfo) -> float | None:
    """A float32 above 0, or None: a plugin is anybody's code. An ancestor's rate says nothing of an own outer step,
    which would then be asked on those peers only that had no room for what came.
    """
    if not issubclass(_definer(method, "rate"), _definer(method, "outer_step")):
        return None
    given, _ = attempted(lambda: method.rate(info))
    found, _ = attempted(lambda: float32(float(given)))  # type: ignore[arg-type]  # TypeError is what None gives
    return found if found is not None and math.isfinite(found) and found > 0 else None


def _definer(method: OuterMethod, name: str) -> type:
    return next(one for one in type(method).__mro__ if name in vars(one))
