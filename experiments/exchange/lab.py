"""Whole rounds of real peers, each on a namespace of its own behind a line with a rate and a delay, over the bound.

    python -m experiments.exchange.lab --kind gather --peers 8 --mbit 20 --delay 0.0125 --megabytes 1
    python -m experiments.exchange.lab --kind reduce --peers 8 --mbit 20 --megabytes 4 --against gloo --against hivemind

As root on Linux; see docs/natlab.md for what it needs. The delay is one way, from a peer to the core. Others take turns
with ours, round by round on the same lines: all are there all the time, one exchanges.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

from decentral.benchmarks.exchange import BOUNDS, Case, ExchangeResult, Step, Worker, step, swarm
from experiments.exchange.rival_peer import SYSTEMS, RivalSeat
from tests.natlab.lab import Host, Lab
from tests.natlab.namespaces import LabError, why_impossible
from tests.natlab.wires import Line

OURS = "decentral"  # among teams


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=sorted(BOUNDS), default="gather")
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--mbit", type=float, default=20.0, help="each way")
    parser.add_argument("--slow", type=float, default=None, help="Mbit/s that the last peer sends instead")
    parser.add_argument("--delay", type=float, default=0.0125, help="seconds one way")
    parser.add_argument("--megabytes", type=int, default=1, help="of float32")
    parser.add_argument("--many", action="store_true", help="tensors, those of a language model, and not one")
    parser.add_argument("--compressor", default="none")
    parser.add_argument("--computing", type=float, default=0.0, help="seconds of inner steps, by a timer")
    parser.add_argument("--overlap", action="store_true", help="the next inner steps begin at once")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm", type=int, default=1, help="rounds before those, until uplinks are known")
    parser.add_argument("--transport", choices=["daemon", "native"], default=None)
    parser.add_argument("--against", choices=sorted(SYSTEMS), action="append", default=[])
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
        many=given.many,
        ups=tuple(1.25e5 * rate for rate in rates),
        downs=(1.25e5 * given.mbit,) * given.peers,
        compressor=given.compressor,
        capped=False,
        rounds=given.rounds,
        transport=given.transport,
        computing=given.computing,
        overlap=given.overlap,
    )
    with Lab() as lab:
        lines = [Line(up=rate, down=given.mbit, delay=given.delay) for rate in rates]
        hosts = [lab.public(f"peer{number}", line) for number, line in enumerate(lines)]
        with teams_on(hosts, case, given.against) as teams:
            found = in_turns(teams, given.warm, given.rounds)
    for name, steps in found.items():
        print(json.dumps({"system": name, **ExchangeResult(case, tuple(steps)).to_json()}), flush=True)
    return 0


@contextmanager
def teams_on(hosts: Sequence[Host], case: Case, against: Sequence[str]) -> Iterator[Mapping[str, Sequence[Worker]]]:
    """Our peers and those of other systems, one of each on every host, while the block lasts.

    TCP is as Linux has it, cubic, whatever this machine prefers: with bbr no connection begins slowly again. LabError
    where it may not be chosen.
    """
    _choose_cubic(hosts)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        teams = {OURS: stack.enter_context(_ours(case, Path(folder), hosts))}
        yield teams | {system: stack.enter_context(_rivals(system, case, hosts)) for system in against}


def _choose_cubic(hosts: Sequence[Host]) -> None:
    try:
        for host in hosts:
            host.sysctl("net/ipv4/tcp_congestion_control", "cubic")
    except PermissionError:
        how = 'sysctl -w net.ipv4.tcp_allowed_congestion_control="reno cubic bbr"'
        raise LabError(f"this machine lets no namespace have TCP's usual congestion control; allow it: {how}") from None


def in_turns(teams: Mapping[str, Sequence[Worker]], warm: int, rounds: int) -> dict[str, list[Step]]:
    """Rounds of each team, but for the first ``warm``."""
    found: dict[str, list[Step]] = {name: [] for name in teams}
    for number in range(warm + rounds):
        for name, workers in teams.items():
            done = step(workers)
            print(f"{name} {number - warm}: {done.seconds:.2f} s, equal {done.equal}", file=sys.stderr, flush=True)
            found[name] += [done] if number >= warm else []
    return found


def _launcher(hosts: Sequence[Host]) -> Callable[[int, Sequence[str]], subprocess.Popen[str]]:
    def launch(number: int, command: Sequence[str]) -> subprocess.Popen[str]:
        return hosts[number].start(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    return launch


@contextmanager
def _ours(case: Case, folder: Path, hosts: Sequence[Host]) -> Iterator[Sequence[Worker]]:
    with swarm(case, folder, _launcher(hosts), lambda number: f"/ip4/{hosts[number].v4}/tcp/4001") as workers:
        yield workers


@contextmanager
def _rivals(system: str, case: Case, hosts: Sequence[Host]) -> Iterator[Sequence[Worker]]:
    launch, bootstrap = _launcher(hosts), list[str]()
    with ExitStack() as stack:
        workers: list[Worker] = []
        for number, host in enumerate(hosts):
            seat = RivalSeat(
                system=system,
                kind=case.kind,
                number=number,
                peers=len(hosts),
                rows=case.rows,
                address=str(host.v4),
                first=str(hosts[0].v4),
                bootstrap=bootstrap,
            )
            command = (sys.executable, "-m", "experiments.exchange.rival_peer", json.dumps(asdict(seat)))
            workers.append(stack.enter_context(Worker(launch(number, command))))
            addresses = workers[-1].hear()["addresses"]
            bootstrap = bootstrap or addresses
        yield workers


if __name__ == "__main__":
    sys.exit(main())
