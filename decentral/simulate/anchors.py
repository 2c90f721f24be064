"""The judge of models at the end of a run: [I4] where anchors came to rest, by the records, the frames that they name
and the method's equation; [I8] in gossip, by what each peer noted of its own steps.

The equations are written again in `decentral.simulate.equations`, from the papers, so that an error of a method shows.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor

from decentral.compressors import parse_feedback
from decentral.consensus.chain import contributions
from decentral.manifest import Manifest
from decentral.optimizers import make_outer
from decentral.parameters import Fragment
from decentral.replica.codec import FixedShapes, codec_of, range_shapes
from decentral.rounds.gossip import UNDECIDED
from decentral.simulate.equations import EQUATIONS, NOT_LINEAR, PULLS, SHARE, WEIGH, Averaged, Stood
from decentral.simulate.lessons import LessonName, first_anchors, toy_schema
from decentral.simulate.trace import Entry, Trace, Verdict
from decentral.state.snapshot import anchor_name
from decentral.wire.frames import HEADER_NBYTES, Frame, parse
from decentral.wire.keys import PeerId
from decentral.wire.messages import Record

__all__ = ["chain_at_rest", "check_anchors", "check_pairs", "parsed"]

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


# ---- pairs of gossip ----
#
# Did both of a pair step, and was nothing made or lost by it?
#
# A step that both of a pair took moves their sum by what the equation says and by nothing else: the two pulls towards
# the mean cancel.

TOLERANCE = 1e-3  # of the largest parameter: what fp16 and float32 rounding leave of a sum of two
NEAR = 3 * UNDECIDED  # s between two entries of one step: a peer that crashed or restored a backup takes it again
DEATHS = ("crashed", "failed", "gone")  # who has "left" says goodbye for a while, and may still ask


def check_pairs(trace: Trace, manifest: Manifest, verdict: Verdict) -> None:
    """[I8] Both of a pair step with each other, and their sum is kept."""
    hosts = {entry.fields["peer"]: entry.host for entry in trace.of("started")}
    taken: dict[tuple[int, int], list[Entry]] = defaultdict(list)  # host, gossip step: again after a crash
    for entry in trace.of("swapped"):
        taken[entry.host, entry.fields["round"]].append(entry)
    for mine in trace.of("swapped"):
        if mine.fields["partner"] is None:
            continue
        partner, number = hosts[mine.fields["partner"]], mine.fields["round"]
        near = [e for e in taken[partner, number] if abs(e.time - mine.time) < NEAR]
        both = [e for e in near if e.fields["partner"] is not None]
        if both and mine.host < partner:
            _sum_is_kept(mine, min(both, key=lambda e: abs(e.time - mine.time)), manifest, verdict)
        elif near and not both and not _undecidable(trace, mine, partner):
            verdict.lost_updates += 1
            verdict.say(f"[I8] gossip step {number}: host {mine.host} took it with host {partner}, which took it alone")


def _undecidable(trace: Trace, mine: Entry, partner: int) -> bool:
    """Whether one of the two died, or the link between them, while a leader was waiting for its answer.

    The two generals' problem: whoever answers last cannot know that it was heard. Nothing else is an excuse.
    """
    number, pair = mine.fields["round"], {mine.host, partner}
    for told in trace.of("node_undecided"):  # by the leader, when it gave up
        asked = told.time - told.fields["seconds"]
        if told.host == partner and told.fields["round"] == number and asked <= mine.time <= told.time:
            return any(_strikes(entry, pair) for entry in trace if asked <= entry.time <= told.time)
    close = (entry for entry in trace if abs(entry.time - mine.time) <= UNDECIDED)  # it was asked within that
    return any(entry.event in DEATHS and entry.host in pair for entry in close)


def _strikes(entry: Entry, pair: set[int]) -> bool:
    if entry.event == "cut":
        return any(set(cut) == pair for cut in entry.fields["pairs"])
    return entry.event in DEATHS and entry.host in pair


def _sum_is_kept(mine: Entry, other: Entry, manifest: Manifest, verdict: Verdict) -> None:
    outer = manifest.outer
    if outer.method not in PULLS:
        return
    keys = dataclasses.asdict(make_outer(outer.method, outer.hyper))  # type: ignore[call-overload]  # a dataclass
    pair = (mine, other)
    moved_2N = torch.stack([entry.tensors["after"].double() - entry.tensors["before"].double() for entry in pair])
    told_2N = torch.stack([PULLS[outer.method](Stood.of(entry.tensors), keys) for entry in pair])
    off_N = (moved_2N - told_2N).sum(0)
    if outer.method in NOT_LINEAR:  # only the sum of a fragment's values is kept
        off_N = off_N.mean(0, keepdim=True)
    largest = float(torch.stack([mine.tensors["before"], mine.tensors["change"]]).abs().max())
    if float(off_N.abs().max()) > TOLERANCE * largest + 1e-6:
        verdict.lost_updates += 1
        verdict.say(
            f"[I8] gossip step {mine.fields['round']}: hosts {mine.host} and {other.host} did not keep their sum"
        )
