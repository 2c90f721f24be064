"""What was played, as a table, as lines of CSV and as a figure: from the file of results alone, in seconds.

python -m experiments.contestants.report
"""

from __future__ import annotations

import argparse
import csv
import io
from pathlib import Path

from experiments.contestants.results import RESULTS, Result, read
from experiments.contestants.terms import BATCH_SIZE, KNOBS

TITLES = {
    "sparseloco": "decentral, `sparseloco`",
    "diloco": "decentral, `diloco`",
    "hivemind": "hivemind, local updates",
    "torchft": "torchft, DiLoCo",
    "ddp": "DDP over gloo",
}
SEARCH = 60.0  # s: matches as short as that are the search


def main() -> None:
    """Write table.md, results.csv and figure.png beside the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    path = parser.parse_args().results
    results = read(path)
    told = markdown(results)
    path.with_name("table.md").write_text(told, encoding="utf-8")
    path.with_name("results.csv").write_text(as_csv(results), encoding="utf-8")
    from experiments.contestants.figure import draw

    draw([result for result in longest(matches(results)) if result.match.seed == 0], path.with_name("figure.png"))
    print(told)


def matches(results: list[Result]) -> list[Result]:
    """Without the search, in the order of the contestants."""
    order = list(KNOBS)
    played = [result for result in results if result.match.seconds > SEARCH]
    return sorted(played, key=lambda one: order.index(one.match.contestant))


def longest(played: list[Result]) -> list[Result]:
    """Of each kind of match on each line those that went on longest: shorter ones are their beginnings."""
    kinds = [(one.match.mbit, one.match.churn) for one in played]
    most = {
        kind: max(one.match.seconds for one, its in zip(played, kinds, strict=True) if its == kind) for kind in kinds
    }
    return [one for one, kind in zip(played, kinds, strict=True) if one.match.seconds == most[kind]]


def groups(played: list[Result]) -> dict[str, list[Result]]:
    """Matches that can be compared, under their title: quiet ones first, slow lines first."""
    found: dict[str, list[Result]] = {}
    for result in sorted(played, key=lambda one: (one.match.churn, one.match.mbit, one.match.seconds)):
        match = result.match
        churn = ", one killed at a third, one joins at half" if match.churn else ""
        found.setdefault(f"{match.mbit:g} Mbit/s, {match.seconds / 60:g} minutes{churn}", []).append(result)
    return found


def markdown(results: list[Result]) -> str:
    """All tables."""
    parts = ["# What a user would pick instead, on the same lines", ""]
    for title, group in groups(matches(results)).items():
        churn = group[0].match.churn
        parts += [f"## {title}", "", *(table(CHURN if churn else QUIET, group)), ""]
    searched = sorted(results, key=lambda one: list(KNOBS).index(one.match.contestant))
    found = [one for one in searched if one.match.seconds <= SEARCH and not one.match.churn]
    if found:
        parts += ["## The search: 20 Mbit/s, one minute each", "", *table(QUIET, found), ""]
    return "\n".join(parts)


def quiet_cells(result: Result) -> list[str]:
    """Of a match in which nothing happened."""
    steps = [peer.steps for peer in result.survivors]
    return [
        title(result),
        setting(result),
        f"{result.bits:.3f}",
        f"{result.worst:.3f}",
        f"{100 * result.computing:.0f} %",
        f"{sum(steps) / len(steps):.0f}",
        f"{result.pause:.1f}",
        f"{result.sent / 1e6:.1f}",
    ]


def churn_cells(result: Result) -> list[str]:
    """Of a match with a death and a birth."""
    late, goers, survivors = result.late, len(result.goers), len(result.survivors)
    came = late is not None and late.first is not None and late.trains_at(result.match.seconds)
    waited = f"{late.first - (late.asked or 0):.1f}" if came and late and late.first else "never"
    return [
        title(result),
        f"{goers} of {survivors}",
        f"{result.bits:.3f}",
        f"{result.pause:.1f}",
        f"{100 * result.computing:.0f} %",
        waited,
        f"{late.bits:.3f}" if came and late else "",
        "nothing" if goers == survivors and came else by_hand(result, came=came),
    ]


def by_hand(result: Result, *, came: bool) -> str:
    """What somebody would have to start again, or let in."""
    stopped = [peer for peer in result.survivors if peer not in result.goers]
    waits = [f"one still waits, {result.match.seconds - one.last:.0f} s" for one in stopped if one.ended == "silent"]
    failed = len(stopped) - len(waits)
    return ", ".join([*([f"{failed} peers"] if failed else []), *waits, *([] if came else ["the newcomer"])])


QUIET = (
    ("", "setting", "bits per byte", "worst peer", "computing", "steps a peer", "longest step, s", "MB sent by all"),
    quiet_cells,
)
CHURN = (
    (
        "",
        "train at the end",
        "bits per byte",
        "longest without a step, s",
        "computing",
        "newcomer trains after, s",
        "newcomer's bits per byte",
        "to restart by hand",
    ),
    churn_cells,
)


def table(kind: tuple, group: list[Result]) -> list[str]:
    """Lines of Markdown."""
    heads, cells = kind
    rule = ["---", *["---:"] * (len(heads) - 1)]
    return [f"| {' | '.join(row)} |" for row in [list(heads), rule, *map(cells, group)]]


def title(result: Result) -> str:
    """For people."""
    seed = result.match.seed
    return TITLES[result.match.contestant] + (f", seed {seed}" if seed else "")


def setting(result: Result) -> str:
    """The knob as its owner names it."""
    match, knob = result.match, result.match.knob
    named = {
        "hivemind": f"target_batch_size {BATCH_SIZE * match.peers * knob}",
        "torchft": f"sync_every {knob}",
        "ddp": {"none": "float32", "fp16": "fp16 hook", "powersgd": "PowerSGD hook"}.get(str(knob), str(knob)),
    }
    return named.get(match.contestant, f"H {knob}")


def as_csv(results: list[Result]) -> str:
    """A line for each look at each peer's weights."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    heads = ["contestant", "knob", "mbit", "match_seconds", "churn", "seed", "rank", "ended", "seconds", "steps"]
    writer.writerow([*heads, "sent_bytes", "bits_per_byte"])
    for result in results:
        match = result.match
        told = [match.contestant, match.knob, f"{match.mbit:g}", f"{match.seconds:g}", int(match.churn), match.seed]
        for peer in result.peers:
            for at, steps, nbytes, bits in peer.curve:
                writer.writerow([*told, peer.rank, peer.ended[:60], f"{at:.1f}", steps, nbytes, f"{bits:.4f}"])
    return text.getvalue()


if __name__ == "__main__":
    main()
