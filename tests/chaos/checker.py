"""Judges a run by what was written down: the peers' journals and events, the log of faults, the samples of /proc.

Knows nothing of the code under test but the names of its events. Everything it finds is one line.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.evidence import Evidence
from tests.chaos.schedule import EVERYBODY, KINDS
from tests.chaos.trend import Trend, trend

MOST_SILENCE = 60.0  # s between two commits of the swarm: at least one in every minute, wherever it begins
RESUME_WITHIN = 60.0  # s from a restart, or from the end of a stop, to that peer's next commit
REBIRTH_WITHIN = 90.0  # s from the death of everybody to the next commit
SETTLED = (
    900.0  # s of a process that are not asked to be flat: 256 commits and 64 rounds of frames fill, at 20 a minute
)
LONG_LIVED = 120.0  # s after that for a process to have a say
MOST_RSS = 4.0  # MiB/h, beyond two standard errors
MOST_FDS = 12.0  # per hour, beyond two standard errors
HARMS = {kind.name for kind in KINDS if kind.name != "clock"}  # after these a peer has to come back


@dataclass(slots=True)
class Observed:
    """Everything a judgement rests on."""

    evidence: Evidence
    log: Sequence[dict[str, Any]]  # faults.jsonl
    began: float  # s, monotonic: all peers up
    ended: float  # s, monotonic: before they were asked to leave
    samples: Sequence[dict[str, Any]] = ()
    surprises: Sequence[str] = ()  # what the harness itself saw
    strays: Sequence[str] = ()
    mounts: Sequence[str] = ()


@dataclass(slots=True)
class Judgement:
    """What is wrong, and what was counted."""

    violations: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)


def judge(observed: Observed) -> Judgement:
    """Apply every check."""
    judgement = Judgement()
    _agreement(observed.evidence, judgement)
    _liveness(observed, judgement)
    _recoveries(observed, judgement)
    _memory_of_commits(observed, judgement)
    _flatness(observed, judgement)
    judgement.figures |= _counts(observed.log)
    judgement.figures["strays"] = len(observed.strays)
    judgement.violations += observed.surprises
    judgement.violations += [f"stray process {stray}" for stray in observed.strays]
    judgement.violations += [f"still mounted: {mount}" for mount in observed.mounts]
    return judgement


# ---- safety ----


def _agreement(evidence: Evidence, judgement: Judgement) -> None:
    """One record per round and one anchor per record, over the living and the dead."""
    forks = {round_: found for round_, found in evidence.records.items() if len(found) > 1}
    torn = {record: found for record, found in evidence.anchors.items() if len(found) > 1}
    judgement.figures |= {"rounds": len(evidence.records), "forks": len(forks), "anchors_that_differ": len(torn)}
    judgement.figures["divergence"] = len(forks) + len(torn)
    for round_, found in sorted(forks.items())[:5]:
        judgement.violations.append(f"round {round_} has {len(found)} records: {_who(found)}")
    for record, found in sorted(torn.items())[:5]:
        judgement.violations.append(f"{len(found)} anchors after record {record[:12]}: {_who(found)}")


def _who(found: dict[str, set[str]]) -> str:
    return "; ".join(f"{value[:12]} at {', '.join(sorted(names))}" for value, names in sorted(found.items()))


def _memory_of_commits(observed: Observed, judgement: Judgement) -> None:
    """A peer that comes back stands no lower than what it had applied, unless its disk was damaged meanwhile."""
    lost = 0
    for name, rows in observed.evidence.events.items():
        damaged = [row["mono"] for row in observed.log if _name(row) == name and row["event"] in ("cut", "corrupted")]
        highest, since = 0, 0.0
        for row in rows:
            if row["event"] in ("commit", "membership", "resynced"):
                highest, since = int(row["round"]), float(row["mono"])
            elif row["event"] == "joined":
                at, mono = int(row["at"]), float(row["mono"])
                if at < highest and not any(since <= when <= mono for when in damaged):
                    lost += 1
                    judgement.violations.append(f"{name} had applied round {highest} and came back at {at}")
                highest, since = at, mono
    judgement.figures["commits_forgotten"] = lost


# ---- liveness ----


def commit_times(evidence: Evidence) -> list[float]:
    """When each commit was first applied by anybody, in order; records that only change the membership left out."""
    first: dict[int, float] = {}
    for rows in evidence.events.values():
        for row in rows:
            if row["event"] == "commit":
                round_, mono = int(row["round"]), float(row["mono"])
                first[round_] = min(first.get(round_, mono), mono)
    return sorted(first.values())


def _liveness(observed: Observed, judgement: Judgement) -> None:
    times = [at for at in commit_times(observed.evidence) if observed.began <= at <= observed.ended]
    deaths = [row["mono"] for row in observed.log if row["event"] == EVERYBODY]
    stones = sorted([observed.began, *times, observed.ended])
    longest = 0.0
    rebirths: list[float] = []
    for before, after in itertools.pairwise(stones):
        planned = [death for death in deaths if before <= death <= after]
        if planned:
            rebirths.append(after - planned[0])
            continue
        longest = max(longest, after - before)
        if after - before > MOST_SILENCE:
            at = before - observed.began
            judgement.violations.append(f"no commit for {after - before:.1f} s, from second {at:.0f} on")
    late = [seconds for seconds in rebirths if seconds > REBIRTH_WITHIN]
    judgement.violations += [f"{seconds:.1f} s from the death of everybody to the next commit" for seconds in late]
    per_minute = _per_minute(times, observed.began, observed.ended, deaths)
    judgement.figures |= {
        "commits": len(times),
        "commits_per_minute": {"min": min(per_minute, default=0), "median": percentile(per_minute, 50)},
        "longest_silence_seconds": round(longest, 1),
        "rebirths_seconds": [round(seconds, 1) for seconds in rebirths],
    }


def _per_minute(times: list[float], began: float, ended: float, deaths: list[float]) -> list[int]:
    """Commits in each whole minute in which not everybody died."""
    counts = []
    for minute in range(int((ended - began) // 60)):
        start = began + 60 * minute
        if any(start - REBIRTH_WITHIN < death < start + 60 for death in deaths):
            continue
        counts.append(bisect.bisect_left(times, start + 60) - bisect.bisect_left(times, start))
    return counts


def _recoveries(observed: Observed, judgement: Judgement) -> None:
    """From each restart, and each end of a stop or of a daemon, to that peer's next commit."""
    took: dict[str, list[float]] = {}
    interrupted = 0
    for row in observed.log:
        if row["peer"] is None or not _begins_recovery(row) or row["mono"] > observed.ended:
            continue
        name, since = _name(row), float(row["mono"])
        commits = [e["mono"] for e in observed.evidence.events.get(name, ()) if e["event"] == "commit"]
        at = bisect.bisect_right(commits, since)
        came = commits[at] if at < len(commits) else float("inf")
        limit = min(_next_harm(observed, name, since), observed.ended)
        if came <= limit:
            took.setdefault(row["event"], []).append(came - since)
        if min(came, limit) - since > RESUME_WITHIN:
            why = f"{name}, {row['event']} at second {since - observed.began:.0f}"
            judgement.violations.append(f"{why}: no commit of its own within {RESUME_WITHIN:g} s")
        elif came > limit:
            interrupted += 1
    every = [seconds for found in took.values() for seconds in found]
    judgement.figures["recoveries"] = {kind: summary(found) for kind, found in {**took, "all": every}.items()}
    judgement.figures["recoveries_interrupted"] = interrupted


def _begins_recovery(row: dict[str, Any]) -> bool:
    return row["event"] in ("start", "continued") or (row["event"] == "kill_daemon" and bool(row["done"]))


def _next_harm(observed: Observed, name: str, since: float) -> float:
    """When the next fault of this peer, or the death of everybody, cut its recovery short."""
    for row in observed.log:
        hits = row["event"] == EVERYBODY or (_name(row) == name and row["event"] in {*HARMS, "start", "ended"})
        if row["mono"] > since and hits and row.get("done", True):
            return float(row["mono"])
    return float("inf")


# ---- resources ----


def _flatness(observed: Observed, judgement: Judgement) -> None:
    """Memory and descriptors of the peers that lived long enough; daemons are told, not judged."""
    limits = {("peer", "anonymous"): MOST_RSS, ("peer", "fds"): MOST_FDS}
    for kind in ("peer", "daemon"):
        for what, unit in (("rss", 2.0**20), ("anonymous", 2.0**20), ("fds", 1.0)):
            found = trend(_series(observed.samples, kind, what, unit), skip=SETTLED, least=LONG_LIVED)
            judgement.figures[f"{kind}_{what}_slope_per_hour"] = None if found is None else _told(found)
            limit = limits.get((kind, what))
            if found is not None and limit is not None and found.per_hour - 2 * found.error > limit:
                grows = f"{found.per_hour:.1f} +- {found.error:.1f} per hour"
                judgement.violations.append(f"{what} of peers grows by {grows}; at most {limit:g} is flat")


def _series(
    samples: Iterable[dict[str, Any]], kind: str, what: str, unit: float
) -> dict[object, list[tuple[float, float]]]:
    found: dict[object, list[tuple[float, float]]] = {}
    for row in samples:
        if row["kind"] == kind:
            found.setdefault((row["peer"], row["pid"]), []).append((row["mono"], row[what] / unit))
    return found


def _told(found: Trend) -> dict[str, float]:
    numbers = {"slope": found.per_hour, "error": found.error, "process_hours": found.hours}
    return {**{name: round(value, 2) for name, value in numbers.items()}, "processes": found.processes}


# ---- counting ----


def _counts(log: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Faults by kind, those that found their victim away apart; and what was ended by SIGKILL."""
    kinds = [EVERYBODY, *(kind.name for kind in KINDS)]
    faults = [row for row in log if row["event"] in kinds]
    done = {kind: sum(row["event"] == kind and row["done"] for row in faults) for kind in kinds}
    peers = sum(row["event"] == "ended" and row["code"] == -9 for row in log)
    return {
        "faults": done,
        "faults_that_found_nobody": sum(not row["done"] for row in faults),
        "kills": {"peers": peers, "daemons": done["kill_daemon"], "total": peers + done["kill_daemon"]},
        "starts": sum(row["event"] == "start" for row in log),
    }


def summary(values: Sequence[float]) -> dict[str, float]:
    """Number, median, 95th percentile and maximum."""
    shape = {"median": percentile(values, 50), "p95": percentile(values, 95), "max": max(values, default=0.0)}
    return {"number": len(values), **{name: round(value, 2) for name, value in shape.items()}}


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` of all do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(percent * len(ordered)) // 100) - 1)] if ordered else 0.0


def _name(row: dict[str, Any]) -> str:
    return f"peer{row['peer']}"
