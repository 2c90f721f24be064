"""How long an outer step takes on equal machines and lines, and what it costs, without a simulation. Arithmetic.

An outer step is H / F inner steps of each peer, F fragments, and what of its messages ``overlap`` inner steps do not
hide: control messages one after another, three times the way to the other side each (a stream is confirmed before
anything goes through it), and the bodies at the line's rate, or at what a window per stream lets through on it. The
processor's time for compression is not counted. ``tests/simulate/test_round_time.py`` holds it against simulated
swarms, the profile ``even``.

Source: Jacobson, Braden and Borman, "TCP Extensions for High Performance", RFC 1323, 1992, for what a window per
stream does to long fast lines; shares of time in computing are told as in Douillard et al., "Streaming DiLoCo with
overlapping communication", 2025, arXiv:2501.18512.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from decentral.flow.schedule import FEW
from decentral.manifest import Manifest
from decentral.optimizers import make_outer
from decentral.replica.codec import Codec, codec_of
from decentral.simulate.cost import of_rounds
from decentral.simulate.cost.sizes import Cost
from decentral.simulate.learning.stand_in import body_nbytes
from decentral.simulate.profiles import PROFILES
from decentral.transport.memory import WINDOW

__all__ = ["RoundTime", "body_of", "steps_for", "time_of_round"]

LATENCY = PROFILES["even"].latency
WAYS = 3  # one-way delays of a message on a stream of its own: open, confirm, say
MESSAGES = {  # one after another, from the last inner step to the first one of the peers that hear of the commit last
    "gather": 4,  # offer beside the frame, proposal, vote, commit
    "reduce": 7,  # offer, plan, slice, result, proposal, vote, commit
    "pair": 8 / 3,  # the halves, and one of the two asks whether the other has them
}


@dataclass(frozen=True, slots=True)
class RoundTime:
    """What is expected of one outer step, with ``steps`` inner steps between two of the same parameters."""

    steps: int  # H
    fragments: int
    training: float  # s in inner steps
    wait: float  # s in which a peer waits for the round
    nbytes: float  # that a peer sends, messages included

    @property
    def seconds(self) -> float:
        """From one outer step to the next."""
        return self.training + self.wait

    def with_steps(self, steps: int) -> RoundTime:
        """The same with another H, which no message depends on."""
        return replace(self, steps=steps, training=self.training * steps / self.steps)

    @property
    def share(self) -> float:
        """Of the time, in inner steps."""
        return self.training / self.seconds


def time_of_round(manifest: Manifest, num_parameters: int, peers: int, rate: float, step_seconds: float) -> RoundTime:
    """What an outer step of ``peers`` equal peers on lines of ``rate`` bytes per second each way takes."""
    outer, steps = manifest.outer, manifest.inner.steps
    spent = _sent(manifest, max(1, num_parameters // outer.fragments), peers)
    kind = manifest.exchange.kind
    streams = {"gather": peers - 1, "reduce": min(FEW, peers - 1), "pair": 1}[kind]
    moving = spent.nbytes / min(rate, max(1, streams) * WINDOW / LATENCY)
    there = moving + WAYS * MESSAGES[kind] * LATENCY
    hidden = outer.overlap * step_seconds
    return RoundTime(
        steps, outer.fragments, step_seconds * steps / outer.fragments, max(0.0, there - hidden), spent.nbytes
    )


def steps_for(time: RoundTime, step_seconds: float, share: float, least: int, most: int) -> int:
    """The fewest inner steps H from ``least`` to ``most`` with which ``share`` of the time is training, else ``most``.

    A multiple of the fragments, as a manifest wants it: ``least`` and ``most`` are rounded up and down to that.
    """
    between = time.wait * share / (1.0 - share) / step_seconds
    rounded = time.fragments * math.ceil(between - 1e-9)
    lowest, highest = time.fragments * -(-least // time.fragments), time.fragments * (most // time.fragments)
    return max(time.fragments, min(max(rounded, lowest), highest))


def _sent(manifest: Manifest, numel: int, peers: int) -> Cost:
    """Frames and messages of one round of one peer. States beside the change are counted as if all were due."""
    codec, kind = codec_of(manifest), manifest.exchange.kind
    channels = len(make_outer(manifest.outer.method, manifest.outer.hyper).channels())
    if kind == "pair":
        return of_rounds.pair(peers, numel, lambda values: body_nbytes(codec, max(1, round(values))), vectors=channels)
    frames = of_rounds.reduce if kind == "reduce" else of_rounds.gather
    sizes = {}

    def body(values: int) -> float:
        if values not in sizes:
            sizes[values] = _all_channels(codec, values, channels)
        return sizes[values]

    return frames(peers, numel, body) + of_rounds.control(kind, peers, numel)


def body_of(manifest: Manifest, num_parameters: int, peers: int) -> float:
    """Bytes of the body that a peer of so many makes of its contribution, in a reduce of all its slices."""
    codec, numel = codec_of(manifest), max(1, num_parameters // manifest.outer.fragments)
    channels = len(make_outer(manifest.outer.method, manifest.outer.hyper).channels())
    if manifest.exchange.kind == "pair":
        return body_nbytes(codec, numel * channels)
    cuts = max(1, peers) if manifest.exchange.kind == "reduce" else 1
    return cuts * _all_channels(codec, max(1, numel // cuts), channels)


def _all_channels(codec: Codec, values: int, channels: int) -> float:
    return body_nbytes(codec.of(0), values) + sum(body_nbytes(codec.of(one), values) for one in range(1, channels))
