"""A judgement as a table for people; the JSON beside it says the same."""

from __future__ import annotations

from typing import Any

from tests.chaos.checker import Judgement


def table(judgement: Judgement) -> str:
    """Two columns, one line per figure."""
    figures = judgement.figures
    kills, commits = figures["kills"], figures["commits_per_minute"]
    rows = [
        ("kills", f"{kills['total']}: {kills['peers']} peers, {kills['daemons']} daemons"),
        ("faults", ", ".join(f"{kind} {number}" for kind, number in figures["faults"].items() if number)),
        ("found nobody", str(figures["faults_that_found_nobody"])),
        ("commits", f"{figures['commits']}; per minute: least {commits['min']}, median {commits['median']:g}"),
        ("longest silence", f"{figures['longest_silence_seconds']} s"),
        ("everybody died", ", ".join(f"{s} s to the next commit" for s in figures["rebirths_seconds"]) or "never"),
        *[(f"back after {kind}", _spread(found)) for kind, found in figures["recoveries"].items()],
        ("interrupted", f"{figures['recoveries_interrupted']} recoveries, by the next fault"),
        ("divergence", f"{figures['divergence']} in {figures['rounds']} rounds"),
        ("commits forgotten", str(figures["commits_forgotten"])),
        *[(name.replace("_", " "), _slope(figures[name])) for name in figures if name.endswith("_slope_per_hour")],
        ("strays", str(figures["strays"])),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def _spread(found: dict[str, float]) -> str:
    return f"{found['number']}: median {found['median']} s, p95 {found['p95']} s, max {found['max']} s"


def _slope(found: dict[str, Any] | None) -> str:
    if found is None:
        return "no process lived long enough"
    return f"{found['slope']} +- {found['error']} ({found['processes']} processes, {found['process_hours']} h)"
