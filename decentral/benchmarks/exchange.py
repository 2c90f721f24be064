"""Seconds from the start of an exchange to the commit on every peer, over what the links alone need.

Every peer is a process with its transport; a whole step is timed: offers, frames or slices, proposal, votes, commit,
outer step and digest. The peers run where ``launch`` starts them: here, behind caps, or each on a network of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from decentral.benchmarks.exchange_peer import ExchangeSeat
from decentral.errors import DecentralError
from decentral.manifest import Manifest, check_methods, preset_manifest

PRESETS = {"gather": "sparseloco", "reduce": "diloco", "pair": "noloco"}
Launch = Callable[[int, Sequence[str]], "subprocess.Popen[str]"]  # peer number and command line


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A swarm and its exchange. Rates in bytes per second, one for each peer."""

    kind: str  # gather, reduce, pair
    rows: int  # of 1,024 values
    many: bool = False  # tensors: those of a language model, and not one
    ups: tuple[float, ...]
    downs: tuple[float, ...]
    compressor: str = "none"
    capped: bool = True  # the rates are kept by the peers' own caps; else the network does
    rounds: int = 5
    transport: str | None = None
    computing: float = 0.0  # s of a timer before each contribution, in place of inner steps
    overlap: bool = False  # the next ones begin as soon as it is taken, and not when the round is over

    @property
    def contributors(self) -> int:
        """Peers whose contribution counts, where nobody is late."""
        return 2 if self.kind == "pair" else len(self.ups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A round that was timed."""

    seconds: float  # of the peer that took longest
    each: tuple[float, ...]  # seconds of every peer
    processor: float  # s that a peer's processes took of it, on average
    held: float  # s of it in which a training thread copies parameters out and in, of the peer that took longest
    nbytes: float  # of one peer's body as it is encoded
    sent: float  # bytes, by the peer that sent most, everything included
    equal: bool  # all peers ended with the same digest; of pairs, all have met
    contributors: int
    ballot: int  # that decided; 0: the first leader had its votes before anybody's patience ended


@dataclass(frozen=True, slots=True)
class ExchangeResult:
    """Measurements of all rounds but the first, which warms up."""

    case: Case
    steps: tuple[Step, ...]

    @property
    def seconds(self) -> float:
        """Return the seconds of the median round."""
        return median(step.seconds for step in self.steps)

    @property
    def processor(self) -> float:
        """Return the median round's seconds of processor, of one peer."""
        return median(step.processor for step in self.steps)

    @property
    def bound(self) -> float:
        """Seconds for the bytes that the median round's bodies had."""
        nbytes = median(step.nbytes for step in self.steps)
        return BOUNDS[self.case.kind](nbytes, self.case.ups, self.case.downs)

    @property
    def over_sent(self) -> float:
        """Bytes of the peer that sent most, over the copies of a body that each has to send on equal links."""
        copies = COPIES[self.case.kind](len(self.case.ups))
        return median(step.sent / (copies * step.nbytes) for step in self.steps)

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        """All of it, and the ratio."""
        return {
            **asdict(self.case),
            "seconds": round(self.seconds, 3),
            "held_seconds": round(median(step.held for step in self.steps), 4),
            "computing_share": round(self.case.computing / self.seconds, 4),
            "processor_seconds": round(self.processor, 3),
            "bound_seconds": round(self.bound, 3),
            "over_bound": round(self.seconds / self.bound, 3),
            "over_sent": round(self.over_sent, 3),
            "equal": all(step.equal for step in self.steps),
            "all_contributed": all(step.contributors == self.case.contributors for step in self.steps),
            "steps": [asdict(step) for step in self.steps],
        }


class Worker:
    """A peer's process, told what to do."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.addresses: Sequence[str] = ()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def tell(self, order: str) -> None:
        """Give an order; ``hear`` its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": order}) + "\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:  # Any: JSON
        """The next answer. DecentralError when the process ended instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise DecentralError(f"a peer of the benchmark ended with {self._process.wait()}; see what it wrote above")
        return dict(json.loads(line))


def here(number: int, command: Sequence[str]) -> subprocess.Popen[str]:
    """Start a peer on this machine."""
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def measure(
    case: Case,
    folder: Path,
    launch: Launch = here,
    listen: Callable[[int], str] | None = None,
    on_done: Callable[[], None] = lambda: None,
) -> ExchangeResult:
    """Start the peers, exchange, end them. Raises DecentralError when one of them ends by itself.

    ``on_done`` is called after each of ``case.rounds + 1`` exchanges.
    """
    steps = []
    with swarm(case, folder, launch, listen) as workers:
        for _ in range(case.rounds + 1):
            steps.append(step(workers))
            on_done()
    return ExchangeResult(case, tuple(steps[1:]))


@contextmanager
def swarm(
    case: Case, folder: Path, launch: Launch = here, listen: Callable[[int], str] | None = None
) -> Iterator[Sequence[Worker]]:
    """The peers of ``case``, members all of them, while the block lasts."""
    manifest = terms(case)
    with ExitStack() as stack:
        workers: list[Worker] = []
        bootstrap: list[str] = []
        for number in range(len(case.ups)):
            seat = _seat(case, manifest, folder, number, bootstrap, listen)
            command = (sys.executable, "-m", "decentral.benchmarks.exchange_peer", json.dumps(asdict(seat)))
            workers.append(stack.enter_context(Worker(launch(number, command))))
            workers[-1].addresses = workers[-1].hear()["addresses"]
            bootstrap = bootstrap or list(workers[-1].addresses)
        _until_all_are_members(workers)
        yield workers


def step(workers: Sequence[Worker]) -> Step:
    """Have all of them exchange once.

    All have trained before any clock starts: on busy cores a round would else last as long as the last one trains.
    """
    _ask_all(workers, "train")
    found = _ask_all(workers, "round")
    return Step(
        seconds=max(one["seconds"] for one in found),
        each=tuple(one["seconds"] for one in found),
        processor=sum(one["processor"] for one in found) / len(found),
        held=max(one["held"] for one in found),
        nbytes=max(one["nbytes"] for one in found),
        sent=max(one["sent"] for one in found),
        equal=len({one["digest"] for one in found}) == 1,
        contributors=min(one["contributors"] for one in found),
        ballot=max(one["ballot"] for one in found),
    )


def _ask_all(workers: Sequence[Worker], order: str) -> list[dict[str, Any]]:  # Any: JSON
    for worker in workers:
        worker.tell(order)
    return [worker.hear() for worker in workers]


def terms(case: Case) -> Manifest:
    """A run of all peers or none."""
    n = len(case.ups)
    manifest = preset_manifest(
        PRESETS[case.kind],
        run={"rounds": case.rounds + 100, "salt": "exchange"},
        inner={"steps": 1, "warmup": 0},
        compressor={"chain": case.compressor, "feedback": "none"},
        swarm={"min_peers": n},  # the deadlines are those that a user has: the time of the frames is not theirs
    )
    check_methods(manifest)
    return manifest


def _seat(
    case: Case,
    manifest: Manifest,
    folder: Path,
    number: int,
    bootstrap: Sequence[str],
    listen: Callable[[int], str] | None,
) -> ExchangeSeat:
    return ExchangeSeat(
        folder=str(folder),
        number=number,
        manifest=manifest.to_toml(),
        rows=case.rows,
        many=case.many,
        listen=(listen(number) if listen is not None else "/ip4/127.0.0.1/tcp/0",),
        bootstrap=tuple(bootstrap),
        up=case.ups[number] if case.capped else None,
        down=case.downs[number] if case.capped else None,
        transport=case.transport,
        computing=case.computing,
        overlap=case.overlap,
    )


def _until_all_are_members(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.tell("members")
        while worker.hear()["members"] < len(workers):
            worker.tell("members")


# ---- seconds that no exchange can beat ----
#
# What the links alone need.
#
# P is the body of one peer in bytes, rates are in bytes per second, one for each of N peers.


def gather_bound(nbytes: float, ups: Sequence[float], downs: Sequence[float]) -> float:
    """Everybody gets everybody's body: max(P / up_i, (N-1) P / down_i, N (N-1) P / sum up).

    Who uploads little may send its body once and have others pass it on; all copies together must leave somewhere.
    """
    n = len(ups)
    own = max(nbytes / up for up in ups)
    taken = max((n - 1) * nbytes / down for down in downs)
    return max(own, taken, n * (n - 1) * nbytes / sum(ups))


def reduce_bound(nbytes: float, ups: Sequence[float], downs: Sequence[float]) -> float:
    """Everybody gets the mean: 2 (N-1) P in all must leave and arrive, and each sends and takes a body at least once.

    For equal links that is 2 (N-1)/N P / min(up, down).

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
    """
    n = len(ups)
    both = 2 * (n - 1) * nbytes
    return max(both / sum(ups), both / sum(downs), nbytes / min(ups), nbytes / min(downs))


def pair_bound(nbytes: float, ups: Sequence[float], downs: Sequence[float]) -> float:
    """Each sends its body to one other, whatever the size of the swarm: P / up_i, P / down_i, of the slowest."""
    return nbytes / min(*ups, *downs)


COPIES: dict[str, Callable[[int], float]] = {  # of a body, that one of n peers on equal links sends
    "gather": lambda n: n - 1,
    "reduce": lambda n: 2 * (n - 1) / n,
    "pair": lambda n: 1,
}
BOUNDS = {"gather": gather_bound, "reduce": reduce_bound, "pair": pair_bound}
