"""Whole rounds of real peers, each on a namespace of its own behind a line with a rate and a delay, over the bound.

    python -m experiments.exchange.lab --kind gather --peers 8 --mbit 20 --delay 0.0125 --megabytes 1

As root on Linux; see docs/natlab.md for what it needs. The delay is one way, from a peer to the core.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from decentral.benchmarks.exchange import Case, measure
from tests.natlab.lab import Lab
from tests.natlab.namespaces import why_impossible
from tests.natlab.wires import Line


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=["gather", "reduce"], default="gather")
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--mbit", type=float, default=20.0, help="each way")
    parser.add_argument("--slow", type=float, default=None, help="Mbit/s that the last peer sends instead")
    parser.add_argument("--delay", type=float, default=0.0125, help="seconds one way")
    parser.add_argument("--megabytes", type=int, default=1, help="of float32")
    parser.add_argument("--compressor", default="none")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--transport", choices=["daemon", "native"], default=None)
    return parser.parse_args()


def main() -> int:
    """See above."""
    given = options()
    if why := why_impossible():
        print(f"error: {why}", file=sys.stderr)
        return 1
    rates = [given.mbit] * (given.peers - 1) + [given.mbit if given.slow is None else given.slow]
    case = Case(
        kind=given.kind,
        rows=given.megabytes * 256,
        ups=tuple(1.25e5 * rate for rate in rates),
        downs=(1.25e5 * given.mbit,) * given.peers,
        compressor=given.compressor,
        capped=False,
        rounds=given.rounds,
        transport=given.transport,
    )
    with Lab() as lab, tempfile.TemporaryDirectory() as folder:
        lines = [Line(up=rate, down=given.mbit, delay=given.delay) for rate in rates]
        hosts = [lab.public(f"peer{number}", line) for number, line in enumerate(lines)]

        def launch(number: int, command: Sequence[str]) -> subprocess.Popen[str]:
            return hosts[number].start(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

        found = measure(case, Path(folder), launch, lambda number: f"/ip4/{hosts[number].v4}/tcp/4001")
    print(json.dumps(found.to_json()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
