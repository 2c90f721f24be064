"""The search for terms on somebody's own model: several at once, of which the worse half goes out at each look.

Every candidate trains at the length that the run will have, as far as it comes: the outer rate that suits a run
depends on how many rounds it has, so that shorter trials would choose another one. Nobody goes out before half of the
rounds: outer momentum raises the loss at first, and after a quarter of them the best rate was the worst of four. A peer
alone trains beside them, to the end.

Source: Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization", 2015,
arXiv:1502.07943, whose successive halving this is.
"""

from __future__ import annotations

import math
import multiprocessing
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

import torch

from decentral.errors import ConfigError, DecentralError
from decentral.lab.laboratory import end_with_parent
from decentral.lab.work import LanguagePeer
from decentral.manifest import Manifest, check_methods, preset_manifest
from decentral.manifest.presets import Scale, suit
from decentral.observe.health import in_time
from decentral.quantities import parse_rate
from decentral.tasks.evaluate import check_agreed, survey
from decentral.training.inner import read_inner_settings
from decentral.training.round_time import time_of_round
from decentral.trial.check import check_learns
from decentral.trial.own_model import Build, OwnCourse, OwnTraining, TrainsAlone, training_of

__all__ = ["LOOKS", "Candidate", "Found", "Tuned", "search", "tune"]

LOOKS = (0.5, 0.75, 1.0)  # of the rounds


@dataclass(frozen=True, slots=True)
class Candidate:
    """Terms that are tried, and what people call them."""

    name: str
    manifest: Manifest


@dataclass(slots=True)
class Found:
    """Held-out losses, look by look; those that went out have fewer. NaN: it diverged."""

    rounds: int
    alone: list[float] = field(default_factory=list)
    losses: dict[str, list[float]] = field(default_factory=dict)  # by the candidate's name

    @property
    def best(self) -> str | None:
        """The candidate of the least loss at the end; None where all diverged."""
        whole = {name: told[-1] for name, told in self.losses.items() if len(told) == len(LOOKS)}
        return min(whole, key=whole.__getitem__) if whole else None

    @property
    def gain(self) -> float:
        """By how much the best is below a peer alone; below 0 where training together does not pay."""
        return -math.inf if self.best is None else self.alone[-1] - self.losses[self.best][-1]


def survivors(losses: Mapping[str, float]) -> list[str]:
    """The better half, rounded up, of those that have a number; in the order in which they came."""
    finite = [name for name, loss in losses.items() if math.isfinite(loss)]
    kept = sorted(finite, key=losses.__getitem__)[: math.ceil(len(losses) / 2)]
    return [name for name in losses if name in kept]


def search(
    build: Build,
    candidates: Sequence[Candidate],
    *,
    peers: int,
    rounds: int,
    steps: int,
    first: int = 0,
    processes: int = 1,
    tell: Callable[[str], None] = lambda line: None,
) -> Found:
    """Train ``peers`` replicas by each candidate's terms, and one alone, for ``rounds`` of ``steps`` inner steps.

    ``first``: number of the first peer, which chooses the data. With more than one of ``processes`` each trial has a
    process of its own, and so many compute at a time; ``build`` must be a function of a module then.
    Raises ConfigError when ``build`` or what it gives does not fit.
    """
    found = Found(rounds, losses={one.name: [] for one in candidates})
    makers: dict[str, _Make] = {"": _Make(build, None, peers, first)}
    makers |= {one.name: _Make(build, one.manifest, peers, first) for one in candidates}
    # Trials end first: a thread that waits for one is free then, and Ctrl-C waits for nobody.
    with ThreadPoolExecutor(max(1, processes)) as pool, _trials(makers, processes) as trials:
        running = [one.name for one in candidates]
        for share in LOOKS:
            upto = max(1, round(share * rounds))
            names = ["", *running]
            going = [trials[name].go for name in names]
            if processes > 1:
                losses = [job.result() for job in [pool.submit(go, upto * steps) for go in going]]
            else:
                losses = [go(upto * steps) for go in going]
            told = dict(zip(names, losses, strict=True))
            found.alone.append(told.pop(""))
            for name, loss in told.items():
                found.losses[name].append(loss)
            running = survivors(told)
            tell(_line(upto, rounds, found.alone[-1], told))
    return found


def _line(upto: int, rounds: int, alone: float, told: Mapping[str, float]) -> str:
    best = min(told, key=lambda name: told[name] if math.isfinite(told[name]) else math.inf, default="")
    ahead = f", best together is {best} at {told[best]:.4g}" if best else ""
    return f"round {upto} of {rounds}: alone {alone:.4g}{ahead}"


# ---- trials, here or each in a process of its own ----


class Trial(Protocol):
    """Trains on to a number of inner steps."""

    def go(self, steps: int) -> float:
        """The held-out loss then; NaN once it diverged."""
        ...


@dataclass(frozen=True, slots=True)
class _Make:
    """How a trial begins; is sent to its process."""

    build: Build
    manifest: Manifest | None  # None: a peer alone
    peers: int
    first: int

    def __call__(self) -> Trial:
        if self.manifest is None:
            return TrainsAlone(self.build, self.first)
        return OwnCourse(self.build, self.manifest, self.peers, self.first)


@contextmanager
def _trials(makers: Mapping[str, _Make], processes: int) -> Iterator[Mapping[str, Trial]]:
    with ExitStack() as ends:
        if processes <= 1:
            yield {name: make() for name, make in makers.items()}
        else:
            yield {name: ends.enter_context(_elsewhere(make)) for name, make in makers.items()}


@contextmanager
def _elsewhere(make: _Make) -> Iterator[Trial]:
    """A process that holds a trial until the search is over, and ends with it."""
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    process = context.Process(target=_serve, args=(its, make), daemon=True)
    process.start()
    its.close()
    try:
        yield _Elsewhere(mine)
    finally:
        process.kill()  # it writes nothing
        process.join()
        mine.close()


@dataclass(frozen=True, slots=True)
class _Elsewhere:
    line: Connection

    def go(self, steps: int) -> float:
        try:
            self.line.send(steps)
            told: float | str = self.line.recv()
        except (EOFError, OSError):
            raise ConfigError(
                "a trial's process ended by itself; if memory is short, let fewer train at once: --processes 1"
            ) from None
        if isinstance(told, str):
            raise ConfigError(told)
        return told


def _serve(line: Connection, make: _Make) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent ends it
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    trial: Trial | None = None
    try:
        while True:
            steps = line.recv()
            trial = make() if trial is None else trial
            line.send(trial.go(steps))
    except (EOFError, OSError):
        return
    except DecentralError as error:
        line.send(str(error))
    except Exception as error:  # noqa: BLE001  the user's code: what it says goes to the user's screen
        line.send(f"{type(error).__name__} in the function that builds, or in what it gave: {error}")


# ---- what is tried ----
#
# The dense method and the sparse one at a handful of outer rates each, on the line that is named. On equal terms the
# one that sends more learns more, so that the sparse one is tried only where it makes rounds shorter.

ROUNDS, STEPS = 100, 30  # of a run whose length nobody names
DEFAULT_LINE = 20e6 / 8  # bytes/s
RATES: Mapping[str, Sequence[float]] = {"diloco": (0.5, 0.7, 0.9, 1.1), "sparseloco": (1.0, 1.6, 2.5)}
SHORT = 60.0  # s of computing that are not worth processes of their own, which take seconds to begin
SHORTER = 0.8  # times a round of the dense method: above that the sparse one gains no time


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """The run that terms are wanted for."""

    terms: Manifest  # of which all is kept but method, compressor and exchange
    rounds: int  # of the whole model
    peers: int
    rate: float = DEFAULT_LINE  # bytes/s of everybody's line, each way
    presets: Sequence[str] = ()  # those that are tried; empty: what suits the line
    outer_rates: Sequence[float] = ()  # of every preset; empty: its own few


@dataclass(frozen=True, slots=True)
class Tuned:
    """The outcome of a search."""

    found: Found
    candidates: Sequence[Candidate]
    seconds: Mapping[str, float]  # of a round on the line, by the candidate's name

    @property
    def manifest(self) -> Manifest:
        """The best terms, ready to be written. ConfigError where everything diverged."""
        if self.found.best is None:
            raise ConfigError("every candidate diverged; try smaller outer rates, or look at the model's own rate")
        return next(one.manifest for one in self.candidates if one.name == self.found.best)


def tune(
    source: Build | Manifest,
    *,
    data: str | Path | None = None,
    peers: int = 2,
    rounds: int | None = None,
    inner_steps: int | None = None,
    link: float | str = DEFAULT_LINE,
    presets: Sequence[str] = (),
    outer_rates: Sequence[float] = (),
    first: int = 0,
    processes: int | None = 1,
    tell: Callable[[str], None] = lambda line: None,
) -> Tuned:
    """Terms that suit a model, found by training ``peers`` replicas of it here, and one alone.

    ``source`` is a function of one's own: ``source(number)`` gives peer ``number``'s model, its optimizer, a function
    that makes one inner step and one that gives the held-out loss. Or it is a manifest whose model is built in, which
    then trains on ``data`` (None: the standard library), and of which all is kept but method, compressor and exchange.
    ``rounds`` and ``inner_steps``: the manifest's, or 100 and 30. ``link``: everybody's line, in bytes a second or as
    "20mbit". ``processes``: None for two at a time, or this process alone where all takes less than a minute; with
    more than one ``source`` must be a function of a module, and a script needs its main part guarded. ``search`` has
    the rest.

        tuned = decentral.tune(build, peers=4, rounds=100, inner_steps=30)
        decentral.join(tuned.manifest, model, optimizer)

    Raises ConfigError when ``source`` or what it gives does not fit, or for a preset or a rate that cannot be.
    """
    if not (callable(source) or isinstance(source, Manifest)):
        raise ConfigError(
            f"tune: a {type(source).__name__} builds no model; pass a function of a peer's number, or a Manifest"
        )
    rate = parse_rate(link) if isinstance(link, str) else link
    build = _language_peer(source, data) if isinstance(source, Manifest) else source
    if data is not None and not isinstance(source, Manifest):
        raise ConfigError("data is for terms whose task is text: a function reads its own; leave it out")
    with torch.random.fork_rng():  # what the caller draws next is as if nothing had been tried
        training = training_of(build, first)
        terms = source if isinstance(source, Manifest) else _terms_of(training.optimizers)
        if rounds is None:
            rounds = terms.run.rounds // terms.outer.fragments
        steps = terms.inner.steps if inner_steps is None else inner_steps
        terms = terms.changed(inner={"steps": steps})
        aim = Aim(terms=terms, rounds=rounds, peers=peers, rate=rate, presets=presets, outer_rates=tuple(outer_rates))
        numel = sum(parameter.numel() for parameter in training.model.parameters() if parameter.requires_grad)
        step_seconds = _step_seconds(training)
        candidates, times = candidates_of(aim, numel, step_seconds)
        computing = step_seconds * rounds * steps * (1 + peers * sum(_shares(len(candidates))))
        processes = processes or (1 if computing < SHORT else 2)
        tell(
            f"{len(candidates)} candidates of {peers} peers and a peer alone, {rounds} rounds of {steps} steps: about "
            f"{in_time(computing / processes)} of inner steps, {processes} at a time"
        )
        found = search(
            build,
            candidates,
            peers=peers,
            rounds=rounds,
            steps=steps,
            first=first,
            processes=processes,
            tell=tell,
        )
    return Tuned(found, candidates, times)


def _shares(count: int) -> Iterator[float]:
    """Runs' worth of rounds that all candidates train together, from look to look."""
    before = 0.0
    for share in LOOKS:
        yield count * (share - before)
        before, count = share, math.ceil(count / 2)


def _terms_of(optimizers: Sequence[torch.optim.Optimizer]) -> Manifest:
    """Terms of a loop of one's own, before a method is chosen."""
    inner = read_inner_settings(optimizers)
    return preset_manifest("diloco", rounds=ROUNDS, steps=STEPS, model={"task": "custom"}, inner=inner)


def _language_peer(terms: Manifest, data: str | Path | None) -> LanguagePeer:
    if terms.model.task == "custom":
        raise ConfigError("the terms' model is a script's own; give the function that builds it instead")
    check_agreed(terms.data, None if data is None else survey(Path(data)))
    return LanguagePeer(terms, data)


def candidates_of(aim: Aim, numel: int, step_seconds: float) -> tuple[list[Candidate], dict[str, float]]:
    """Candidates for a model of ``numel`` parameters, and the seconds of a round of each."""
    times: dict[str, float] = {}
    found: list[Candidate] = []
    for preset in aim.presets or RATES:
        rates: Sequence[float | None] = aim.outer_rates or RATES.get(preset, (None,))  # None: the preset's own
        made = [_candidate(aim, preset, rate, numel) for rate in rates]
        took = time_of_round(made[0].manifest, numel, aim.peers, aim.rate, step_seconds).seconds
        if not aim.presets and times and took > SHORTER * min(times.values()):
            continue
        found += made
        times |= {one.name: took for one in made}
    return found, times


def _candidate(aim: Aim, preset: str, rate: float | None, numel: int) -> Candidate:
    whole = preset_manifest(preset, model=aim.terms.model.model_dump())
    check_learns(whole)  # a run is founded by them
    method = whole.model_dump(include={"outer", "compressor", "exchange"})
    manifest = Manifest.of({**aim.terms.model_dump(), **method}, f"preset {preset}")
    manifest = manifest.changed(run={"rounds": aim.rounds * manifest.outer.fragments})  # each has its own outer steps
    manifest = suit(preset, manifest, aim.rounds, Scale(parameters=numel, peers=aim.peers, rate=aim.rate))
    if rate is not None:
        manifest = manifest.changed(outer={"learning_rate": rate})
    check_methods(manifest)
    return Candidate(preset if rate is None else f"{preset} at {rate:g}", manifest)


def _step_seconds(training: OwnTraining, clock: Callable[[], float] = time.perf_counter) -> float:
    """Median of a few, after the first."""
    training.step()
    took = []
    for _ in range(5):
        began = clock()
        training.step()
        took.append(clock() - began)
    return statistics.median(took)
