"""Judges gossip by what each peer noted of its own steps: did both of a pair step, and was nothing made or lost by it?

A step that both of a pair took moves their sum by what the equation says and by nothing else: the two pulls towards
the mean cancel. The equations are written again in `equations.pulls`, from the papers, so that an error of a method
shows.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import torch

from decentral.manifest import Manifest
from decentral.optimizers import make_outer
from decentral.rounds.gossip import UNDECIDED
from decentral.simulate.equations.pulls import NOT_LINEAR, PULLS, Stood
from decentral.simulate.trace import Entry, Trace
from decentral.simulate.verdict import Verdict

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
