"""[I4] Judges where anchors came to rest: the records, the frames that they name, and the method's equation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from decentral.compressors import parse_feedback
from decentral.consensus.chain import contributions
from decentral.manifest import Manifest
from decentral.optimizers import make_outer
from decentral.parameters import Fragment
from decentral.replica.codec import FixedShapes, codec_of, range_shapes
from decentral.simulate.equations.averaged import Averaged
from decentral.simulate.equations.of_methods import EQUATIONS, SHARE, WEIGH
from decentral.simulate.learning.lessons import LessonName, first_anchors, toy_schema
from decentral.simulate.trace import Trace
from decentral.simulate.verdict import Verdict
from decentral.state.snapshot import anchor_name
from decentral.wire.frames import HEADER_NBYTES, Frame, parse
from decentral.wire.keys import PeerId
from decentral.wire.messages import Record

__all__ = ["chain_at_rest", "check_anchors", "parsed"]

ROUNDED = 1e-4  # of the largest value: what float32 leaves of some hundred steps

# Shape suffix: N = elements of one fragment.


def check_anchors(trace: Trace, manifest: Manifest, lesson: LessonName, verdict: Verdict) -> None:
    """The anchor moved by the equation of what the records name, and by nothing else."""
    outer = manifest.outer
    if not _can_be_judged(manifest):
        return
    keys = dataclasses.asdict(make_outer(outer.method, outer.hyper))  # type: ignore[call-overload]  # a dataclass
    firsts_N, schema = first_anchors(lesson, outer.fragments), toy_schema(lesson, outer.fragments)
    averaging, chain = _Averaging(trace, manifest), list(reversed(list(chain_at_rest(trace))))
    averaged = [averaging.of(record, schema.fragments[record.fragment]) for record in chain]
    for f, first_N in enumerate(firsts_N):
        run = [one for record, one in zip(chain, averaged, strict=True) if one and record.fragment == f]
        moved_N = EQUATIONS[outer.method](run, keys) if run else torch.zeros(())
        for entry in trace.of("rested"):
            last_N = entry.tensors[anchor_name(f)].double()
            if float((last_N - first_N.double() - moved_N).abs().max()) > ROUNDED * max(1.0, float(last_N.abs().max())):
                verdict.lost_updates += 1
                verdict.say(f"[I4] host {entry.host}, fragment {f}: its anchor is not where the records lead")


def _can_be_judged(manifest: Manifest) -> bool:
    """Whether what a record averages shows in its frames alone: owners' results do, and frames that count alike."""
    outer, reduces = manifest.outer, manifest.exchange.kind == "reduce"
    plain = outer.norm_clip in (None, "none") and outer.aggregation is None
    alike = plain and manifest.weighting == "equal" and outer.method not in WEIGH
    known = manifest.weighting == "equal" or outer.method not in SHARE if reduces else alike
    return outer.method in EQUATIONS and known


class _Averaging:
    """What records average, from the bytes that their frames hold; they are asked for in order.

    Under ef21 and econtrol a contribution is all that its sender sent for the fragment since it came in.
    """

    def __init__(self, trace: Trace, manifest: Manifest) -> None:
        self._fragments = manifest.outer.fragments
        self._frames, self._codec = trace.frames, codec_of(manifest)
        self._remembers = bool(parse_feedback(manifest.compressor.feedback).receiver)
        self._sent: dict[tuple[PeerId, int], Tensor] = {}

    def of(self, record: Record, fragment: Fragment) -> Averaged | None:
        """One record; None where it names no frames."""
        averaged = self._averaged(record, fragment) if record.frames else None
        self._sent = {key: sent_N for key, sent_N in self._sent.items() if key[0] in record.next_members}
        return averaged

    def _averaged(self, record: Record, fragment: Fragment) -> Averaged:
        name = fragment.parameters[0].name
        frames = [(ref.part, parsed(self._frames[ref.frame])) for ref in record.frames]
        if record.contributors:
            parts = [self._change(frame, range_shapes(*record.partition[part][1:])) for part, frame in sorted(frames)]
            mean_N, count = torch.cat(parts), len(record.contributors)
            rows_KN = mean_N.expand(count, -1)
            return Averaged(mean_N, record.contributors, rows_KN, self._ages(record), name)
        rows_KN = torch.stack([self._contribution(frame, record.fragment, fragment.shapes) for _, frame in frames])
        return Averaged(rows_KN.mean(0), record.frames, rows_KN, self._ages(record), name)

    def _ages(self, record: Record) -> list[int]:
        return [(record.outer_step - ref.based) // self._fragments for ref in contributions(record)]

    def _contribution(self, frame: Frame, fragment: int, shapes: FixedShapes) -> Tensor:
        change_N, key = self._change(frame, shapes), (frame.header.sender, fragment)
        if not self._remembers:
            return change_N
        self._sent[key] = self._sent.get(key, torch.zeros_like(change_N)) + change_N
        return self._sent[key]

    def _change(self, frame: Frame, shapes: FixedShapes) -> Tensor:
        """The first channel."""
        channels = frame.header.channels
        return self._codec.decode(frame.body, tuple(shapes) * channels, channels).view(channels, -1)[0].double()


def chain_at_rest(trace: Trace) -> Iterator[Record]:
    """The records behind the state in which the peers rest, newest first."""
    last = next((entry.fields["hash"] for entry in trace.of("rested")), b"")
    while (commit := trace.commits.get(last)) is not None:
        yield commit.record
        last = commit.record.previous


def parsed(data: bytes) -> Frame:
    """A frame whose bytes are a peer's own."""
    return parse(data, lambda header: len(data) - HEADER_NBYTES)
