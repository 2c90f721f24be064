"""Time and cost of an outer step on equal machines and lines, and terms that fit a line. Arithmetic, no simulation.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from decentral.flow.pacing import FEW
from decentral.manifest import Manifest
from decentral.manifest.presets import Class, Justified, Scale, class_of, faster, find_justification, no_faster
from decentral.optimizers import make_outer, presets
from decentral.replica.codec import Codec, codec_of
from decentral.training import round_cost
from decentral.training.round_cost import Cost
from decentral.transport.memory import WINDOW

LATENCY = 0.040  # s one way, of every line
SAMPLE = 1 << 22  # values that are encoded; a larger model is so many times as large
WAYS = 3  # one-way delays of a message on a stream of its own: open, confirm, say
MESSAGES = {  # one after another, from the last inner step to the first one of the peers that hear of the commit last
    "gather": 4,  # offer beside the frame, proposal, vote, commit
    "reduce": 7,  # offer, plan, slice, result, proposal, vote, commit
    "pair": 8 / 3,  # the halves, and one of the two asks whether the other has them
}


@dataclass(frozen=True, slots=True)
class RoundTime:
    """The expected time of an outer step, with ``steps`` inner steps between two of the same parameters."""

    steps: int  # H
    fragments: int
    training: float  # s in inner steps
    wait: float  # s in which a peer waits for the round
    nbytes: float  # that a peer sends, messages included

    @property
    def seconds(self) -> float:
        """Return the seconds from one outer step to the next."""
        return self.training + self.wait

    def with_steps(self, steps: int) -> RoundTime:
        """Return the same with another H, which no message depends on."""
        return replace(self, steps=steps, training=self.training * steps / self.steps)

    @property
    def share(self) -> float:
        """Return the share of the time that inner steps take."""
        return self.training / self.seconds


def time_of_round(manifest: Manifest, num_parameters: int, peers: int, rate: float, step_seconds: float) -> RoundTime:
    """Return the time of an outer step of ``peers`` equal peers on lines of ``rate`` bytes per second each way."""
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
    """Return the fewest inner steps H from ``least`` to ``most`` with which ``share`` of the time is training, else
    ``most``.

    A multiple of the fragments, as a manifest wants it: ``least`` and ``most`` are rounded up and down to that.
    """
    between = time.wait * share / (1.0 - share) / step_seconds
    rounded = time.fragments * math.ceil(between - 1e-9)
    lowest, highest = time.fragments * -(-least // time.fragments), time.fragments * (most // time.fragments)
    return max(time.fragments, min(max(rounded, lowest), highest))


def _sent(manifest: Manifest, numel: int, peers: int) -> Cost:
    """Count the frames and messages of one round of one peer, all states beside the change as if due."""
    codec, kind = codec_of(manifest), manifest.exchange.kind
    channels = len(make_outer(manifest.outer.method, manifest.outer.hyper).channels())
    if kind == "pair":
        return round_cost.pair(peers, numel, lambda values: body_nbytes(codec, max(1, round(values))), vectors=channels)
    frames = round_cost.reduce if kind == "reduce" else round_cost.gather
    sizes = {}

    def body(values: int) -> float:
        if values not in sizes:
            sizes[values] = _all_channels(codec, values, channels)
        return sizes[values]

    return frames(peers, numel, body) + round_cost.control(kind, peers, numel)


def body_of(manifest: Manifest, num_parameters: int, peers: int) -> float:
    """Return the bytes of the body that a peer of so many makes of its contribution, in a reduce of all its slices."""
    codec, numel = codec_of(manifest), max(1, num_parameters // manifest.outer.fragments)
    channels = len(make_outer(manifest.outer.method, manifest.outer.hyper).channels())
    if manifest.exchange.kind == "pair":
        return body_nbytes(codec, numel * channels)
    cuts = max(1, peers) if manifest.exchange.kind == "reduce" else 1
    return cuts * _all_channels(codec, max(1, numel // cuts), channels)


def _all_channels(codec: Codec, values: int, channels: int) -> float:
    return body_nbytes(codec.of(0), values) + sum(body_nbytes(codec.of(one), values) for one in range(1, channels))


def body_nbytes(codec: Codec, numel: int) -> float:
    """Return the bytes of the body that ``numel`` Gaussian values make, as a matrix of up to 4 M of them."""
    columns = min(numel, 2048)
    rows = max(1, min(numel, SAMPLE) // columns)
    generator = torch.Generator().manual_seed(0)
    sample_N = torch.randn(rows * columns, generator=generator, dtype=torch.float32, device="cpu")
    return len(codec.encode(sample_N, {}, ((rows, columns),)).body) * (numel / (rows * columns))


# ---- terms that fit a line ----
#
# The preset that is justified for it, with inner steps enough to compute nearly always.

TARGET = 0.95  # of the time in inner steps
MARGIN = 1.1  # times the wait: simulated swarms of the four classes wait for up to 1.06 times what arithmetic says
NEAR = 0.9  # times the best share of time in computing: what sends more is better then
MOST = 500  # H: what DiLoCo's own paper trains with; with 1,000 it ended 2.9 % worse in perplexity than with 50
Make = Callable[[str, int | None], Manifest]  # preset, H; None: what the preset has


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """Circumstances that terms are made for."""

    rate: float  # bytes/s of every peer's line, each way
    peers: int
    num_parameters: int
    step_seconds: float  # of an inner step
    own_optimizer: bool = False  # a script's, so that a preset cannot choose what trains inside

    @property
    def scale(self) -> Scale:
        """Return how large a round is."""
        return Scale(parameters=self.num_parameters, peers=self.peers, rate=self.rate)


@dataclass(frozen=True, slots=True)
class Fit:
    """Terms with the time that is expected of them."""

    preset: str
    manifest: Manifest
    time: RoundTime
    link: Class
    known: Justified | None
    asked: bool  # for this preset, whatever the line
    own_optimizer: bool  # of the script that trains
    instead_of: Fit | None = None  # the line's own, for which the run is too short, or the model too small

    @property
    def is_shown(self) -> bool:
        """Return whether somebody showed that it trains well with so many inner steps."""
        return self.known is not None and self.time.steps <= self.known.shown

    @property
    def rounds(self) -> float:
        """Return the number of rounds that the run has."""
        run = self.manifest.run
        return run.rounds if run.minutes is None else min(run.rounds, 60 * run.minutes / self.time.seconds)

    @property
    def lasts(self) -> bool:
        """Return whether the run has as many rounds as the preset should have."""
        return self.known is None or self.rounds >= self.known.rounds

    @property
    def reaches(self) -> bool:
        """Return whether enough of the time is computing."""
        return self.time.share >= TARGET

    @property
    def is_unhindered(self) -> bool:
        """Return whether that takes no more inner steps than it was shown with, and it was shown to be better then."""
        return self.is_shown and self.known is not None and bool(self.known.unhindered)


def fitting(make: Make, given: Circumstances, *, preset: str | None = None, steps: int | None = None) -> Fit:
    """Return the first preset that computes enough with as many inner steps as are justified for it, else the best of
    them.

    Tried are that of the line's class, then those of slower ones; or ``preset`` alone, and ``steps`` alone. Where the
    run is too short for what is found, one of a faster class that computes enough, too, sends more in its few rounds;
    and where the model is small, one of a faster class may compute enough with as few inner steps as it wants. So may
    one where steps are so quick that messages alone take longer, and nothing computes enough.
    """
    link = class_of(given.rate)
    if preset is not None:
        return replace(_fit(make, given, link, preset, steps), asked=True)
    slower = [_fit(make, given, link, name, steps) for name in _for_optimizer(no_faster(link), given)]
    found = next((fit for fit in slower if fit.reaches), None)
    denser = [_fit(make, given, link, name, steps) for name in _for_optimizer(faster(link), given)]
    if found is None:
        best = max(slower, key=lambda fit: fit.time.share)
        near = (fit for fit in denser if fit.lasts and fit.time.share >= NEAR * best.time.share and fit.is_unhindered)
        return replace(next(near, best), instead_of=None)
    fitting_too = (fit for fit in denser if fit.reaches and fit.lasts and (fit.is_unhindered or not found.lasts))
    better = next(fitting_too, None)
    return found if better is None else replace(better, instead_of=found)


def _for_optimizer(names: Sequence[str], given: Circumstances) -> list[str]:
    """Replace presets that live from their inner optimizer by the plain dense one where a script has its own."""
    if not given.own_optimizer:
        return list(names)
    return list(dict.fromkeys("diloco" if presets()[name].inner.get("optimizer") else name for name in names))


def _fit(make: Make, given: Circumstances, link: Class, preset: str, steps: int | None) -> Fit:
    known = find_justification(preset)
    fragments = make(preset, None).outer.fragments
    least = fragments if known is None else known.least
    manifest = make(preset, steps or fragments * (MOST // fragments))
    time = time_of_round(manifest, given.num_parameters, given.peers, given.rate, given.step_seconds)
    if steps is None:
        longer = replace(time, wait=MARGIN * time.wait)
        fewest = steps_for(
            longer, given.step_seconds, TARGET, max(least, fragments * (1 + manifest.outer.overlap)), MOST
        )
        manifest, time = make(preset, fewest), time.with_steps(fewest)
    return Fit(preset, manifest, time, link, known, asked=False, own_optimizer=given.own_optimizer)
