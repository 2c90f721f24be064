"""A peer that stops politely goes on bit for bit where it stopped, wherever in a round that was."""

from __future__ import annotations

import functools
import itertools
import math
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from decentral.errors import DiskError
from decentral.manifest import Manifest
from decentral.observe.status import ENDED, read_status
from decentral.optimizers import presets
from decentral.peer import Peer
from decentral.swarm.identity import Identity
from decentral.training import outer_loop
from decentral.training.schedule import memory_of, tensors_of
from decentral.wire.keys import SEED_NBYTES, Signer
from tests.kit.disks import SlowDisk
from tests.kit.patience import until
from tests.kit.problems import Problem, alone, run_terms, told
from tests.kit.tables import ALONG_DIRECTIONS, SYNCHRONOUS, rows_but

INTERVAL = 4  # inner steps from one contribution to the next
LAST = 3 * INTERVAL
# A reduce, detours, a debt, a blend of fragments.
FEW = (("diloco", INTERVAL - 1), ("eager", 1), ("sparseloco", 1), ("streaming", INTERVAL - 1))
NOT_LEARNT = (*ALONG_DIRECTIONS, "spes")  # which want another inner optimizer, or experts in the model

STOPS = range(INTERVAL, 2 * INTERVAL + 1)
OTHERS = [
    pair
    for pair in itertools.product((n for n in SYNCHRONOUS if n not in NOT_LEARNT), (0, 1, INTERVAL - 1))
    if pair not in FEW
]
# Of FEW a stop before what is in flight is merged, and one after it, and the rest is long; of the others one step each,
# in turn: all of them take a quarter of an hour.
CASES = rows_but(
    [(*pair, stop) for pair, stops in zip(FEW, ((6, 7), (4, 7), (4, 5), (5, 7)), strict=True) for stop in stops],
    [
        *((*pair, stop) for pair in FEW for stop in STOPS),
        *((*pair, stop) for pair, stop in zip(OTHERS, itertools.cycle(STOPS), strict=False)),
    ],
)


def terms_of(preset: str, overlap: int) -> Manifest:
    fragments = presets()[preset].fragments
    return run_terms(preset, run={"rounds": 1000}, inner={"steps": INTERVAL * fragments}, outer={"overlap": overlap})


class Adamant(Problem):
    """Learns by Adam, from data that follow from the number of the inner step."""

    def __init__(self) -> None:
        super().__init__(0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def train(self, peer: Peer, last: int) -> None:
        """Inner steps up to number ``last``; a contribution is committed before the next one, as on a quick network."""
        while peer.inner_steps < last:
            self.data.manual_seed(peer.inner_steps)
            self.step()
            committed(peer)


def committed(peer: Peer) -> None:
    """Wait until what is in flight is on the chain, and in the queue of commits to be merged."""
    until(lambda: not peer.in_flight or not peer.swarm.updates.empty(), lambda: threading.Event().wait(0.002))


@dataclass(frozen=True)
class Kept:
    """All that a peer has to have again."""

    tensors: dict[str, torch.Tensor]
    memory: dict[str, Any]


def kept_by(peer: Peer, problem: Problem) -> Kept:
    part = peer._part
    assert part is not None
    schedule, replica = part.loop.schedule, part.swarm.node.replica
    moments = {
        f"moment/{number}/{name}": one.detach().clone()
        for number, state in problem.optimizer.state_dict()["state"].items()
        for name, one in state.items()
    }
    tensors = {**replica.shared_tensors(), **replica.own_tensors(), **tensors_of(schedule), **moments}
    memory = {"inner_steps": peer.inner_steps, "round": peer.round, **memory_of(schedule)}
    return Kept({**tensors, "live": problem.flat()}, memory)


def check_same(found: Kept, wanted: Kept) -> None:
    assert found.memory == wanted.memory
    assert found.tensors.keys() == wanted.tensors.keys()
    differing = [name for name, one in wanted.tensors.items() if not torch.equal(found.tensors[name], one)]
    assert not differing


@contextmanager
def life(folder: Path, manifest: Manifest, **given: Any) -> Iterator[tuple[Peer, Adamant]]:
    # The same peer each time: the slice of partial_updates, for one, follows from the id.
    identity, problem = Identity(folder / "identity.key", Signer(bytes(SEED_NBYTES))), Adamant()
    if not identity.path.exists():
        Identity.import_text(identity.export_text(), identity.path)
    with alone(folder, manifest, problem, **given) as peer:
        yield peer, problem


def never_stopped(folder: Path, manifest: Manifest) -> list[torch.Tensor]:
    """The live model after each inner step, 0 first."""
    with life(folder, manifest) as (peer, problem):
        found = [problem.flat()]
        for number in range(1, LAST + 1):
            problem.train(peer, number)
            found.append(problem.flat())
    return found


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """More of them take a hundred times as long for so small a model on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], list[torch.Tensor]]:
    """Of a preset and its overlap."""
    return functools.cache(
        lambda preset, overlap: never_stopped(tmp_path_factory.mktemp("straight"), terms_of(preset, overlap))
    )


@pytest.mark.parametrize(("preset", "overlap", "stop"), CASES)
def test_a_peer_that_stops_at_any_inner_step_of_a_round_goes_on_bit_for_bit_where_it_stopped(
    tmp_path: Path, straight: Callable[[str, int], list[torch.Tensor]], preset: str, overlap: int, stop: int
) -> None:
    """A stop merges what waits for its ``overlap``, as no inner step comes any more. So it is to the bit the run that
    never stopped, but where a stop comes between a contribution and its merge: that merge was earlier.
    """
    manifest, never = terms_of(preset, overlap), straight(preset, overlap)
    with life(tmp_path, manifest) as (peer, problem):
        problem.train(peer, stop)
        assert torch.equal(problem.flat(), never[stop])
        waits = not peer.swarm.updates.empty()
    wanted = kept_by(peer, problem)
    assert wanted.memory["inner_steps"] == stop
    with life(tmp_path, manifest) as (peer, problem):
        check_same(kept_by(peer, problem), wanted)
        if not waits:
            problem.train(peer, LAST)
            assert torch.equal(problem.flat(), never[LAST])
    assert waits == (stop % INTERVAL < overlap)


@pytest.mark.parametrize("overlap", [0, 1])
def test_ctrl_c_while_a_contribution_is_in_flight_waits_a_little_for_what_becomes_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: int
) -> None:
    """Its commit came after the checkpoint, and before the goodbye."""
    for bound in ("DECIDED", "APPLIED"):
        monkeypatch.setattr(outer_loop, bound, 60.0)  # this machine may be busy
    manifest = terms_of("diloco", overlap)
    with pytest.raises(KeyboardInterrupt), life(tmp_path, manifest) as (peer, problem):  # noqa: PT012 - as a user's loop
        problem.train(peer, INTERVAL - 1)
        problem.step()
        raise KeyboardInterrupt
    wanted = kept_by(peer, problem)
    assert (wanted.memory["inner_steps"], wanted.memory["round"]) == (INTERVAL, 1)
    with life(tmp_path, manifest) as (peer, problem):
        check_same(kept_by(peer, problem), wanted)


# ---- signals, and errors of the loop ----

DILOCO = ("diloco", 0)
SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGINT") if hasattr(signal, name)]


def trained_until_done(peer: Peer, problem: Adamant, at: Callable[[], None], after: int) -> None:
    """A loop as people write it, in which something happens once, in the step after so many."""
    while not peer.done:
        problem.data.manual_seed(peer.inner_steps)
        if peer.inner_steps == after:
            at()
        problem.step()
        committed(peer)


def check_goes_on(folder: Path, never: list[torch.Tensor], steps: int) -> None:
    """To the bit, from there to the end."""
    with life(folder, terms_of(*DILOCO)) as (peer, problem):
        assert peer.inner_steps == steps
        assert torch.equal(problem.flat(), never[steps])
        problem.train(peer, LAST)
        assert torch.equal(problem.flat(), never[LAST])


@pytest.mark.parametrize(
    ("number", "after"),
    rows_but([(signal.SIGTERM, 5), (signal.SIGTERM, 7), (signal.SIGINT, 4)], list(itertools.product(SIGNALS, STOPS))),
)
def test_a_signal_in_any_step_of_a_round_leaves_and_the_next_life_goes_on_bit_for_bit(
    tmp_path: Path, straight: Callable[[str, int], list[torch.Tensor]], number: signal.Signals, after: int
) -> None:
    """SIGTERM and SIGHUP end the loop with the step in which they come, Ctrl-C before it; the process ends as by it."""
    never, ends = straight(*DILOCO), KeyboardInterrupt if number == signal.SIGINT else SystemExit
    with pytest.raises(ends) as ended, life(tmp_path, terms_of(*DILOCO)) as (peer, problem):
        trained_until_done(peer, problem, lambda: signal.raise_signal(number), after)
    assert number == signal.SIGINT or ended.value.code == 128 + number
    assert read_status(tmp_path).state == "left"
    check_goes_on(tmp_path, never, after if number == signal.SIGINT else after + 1)


@pytest.mark.parametrize("after", [INTERVAL, 2 * INTERVAL - 1])
def test_ctrl_c_inside_the_optimizers_step_is_heard_at_its_end(
    tmp_path: Path, straight: Callable[[str, int], list[torch.Tensor]], after: int
) -> None:
    """Half a step is in no checkpoint, and the round that is due with it is made."""
    with pytest.raises(KeyboardInterrupt), life(tmp_path, terms_of(*DILOCO)) as (peer, problem):  # noqa: PT012

        def once(*_: object) -> None:
            if peer.inner_steps == after:
                signal.raise_signal(signal.SIGINT)

        problem.optimizer.register_step_pre_hook(once)
        trained_until_done(peer, problem, lambda: None, after)
    assert read_status(tmp_path).state == "left"
    check_goes_on(tmp_path, straight(*DILOCO), after + 1)


def test_a_loop_that_does_not_look_at_done_is_ended_at_its_next_step(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended, life(tmp_path, terms_of(*DILOCO)) as (peer, problem):  # noqa: PT012
        for number in range(100):
            if number == 2:
                signal.raise_signal(signal.SIGTERM)
            problem.step()
    assert (ended.value.code, peer.inner_steps) == (128 + signal.SIGTERM, 3)
    assert read_status(tmp_path).state == "left"


class OfTheLoop(Exception):
    """Raised by a user's code."""


def fail(*_: object) -> None:
    raise OfTheLoop("mine")


def in_the_loop(peer: Peer, problem: Adamant) -> None:
    """At two and a half times H, as ever ten rounds after a checkpoint: moments, steps and schedule are there."""
    trained_until_done(peer, problem, fail, 2 * INTERVAL + INTERVAL // 2)


def in_what_on_round_calls(peer: Peer, problem: Adamant) -> None:
    peer.on_round(fail)
    problem.train(peer, LAST)


def in_a_signals_handler_while_a_round_is_waited_for(peer: Peer, problem: Adamant) -> None:
    """As DataLoader's does of a worker that ``timeout`` or a batch system has ended, too."""
    get = peer.swarm.updates.get

    def interrupted(is_time: Any, timeout: float | None = None) -> Any:
        if timeout:
            peer.swarm.updates.get = get  # type: ignore[method-assign]
            fail()
        return get(is_time, timeout)

    problem.train(peer, INTERVAL - 1)
    peer.swarm.updates.get = interrupted  # type: ignore[method-assign]
    problem.train(peer, LAST)


@pytest.mark.parametrize(
    ("where", "kept"),
    [
        (in_the_loop, 2 * INTERVAL + INTERVAL // 2),
        (in_what_on_round_calls, INTERVAL),
        (in_a_signals_handler_while_a_round_is_waited_for, INTERVAL),
    ],
)
def test_an_error_keeps_what_the_last_step_left_and_is_raised_as_it_is(
    tmp_path: Path, straight: Callable[[str, int], list[torch.Tensor]], where: Callable[..., None], kept: int
) -> None:
    with pytest.raises(OfTheLoop, match="mine") as raised, life(tmp_path, terms_of(*DILOCO)) as (peer, problem):
        where(peer, problem)
    assert not hasattr(raised.value, "__notes__")
    wanted = kept_by(peer, problem)
    assert read_status(tmp_path).state not in ENDED
    with life(tmp_path, terms_of(*DILOCO)) as (peer, problem):
        check_same(kept_by(peer, problem), wanted)
    check_goes_on(tmp_path, straight(*DILOCO), kept)


def inside_the_optimizers_step(peer: Peer, problem: Adamant) -> None:
    """Some parameters may have moved, and others not."""
    problem.optimizer.register_step_pre_hook(fail)
    problem.step()


def with_nan_in_the_model(peer: Peer, problem: Adamant) -> None:
    with torch.no_grad():
        next(problem.model.parameters()).fill_(math.nan)


def with_nan_and_an_error(peer: Peer, problem: Adamant) -> None:
    with_nan_in_the_model(peer, problem)
    fail()


@pytest.mark.parametrize(
    ("ends", "why"),
    [
        (inside_the_optimizers_step, "the training loop ended inside optimizer.step"),
        (with_nan_in_the_model, "the model holds NaN or Inf"),
        (with_nan_and_an_error, "the model holds NaN or Inf"),
    ],
)
def test_a_loop_that_ends_badly_leaves_the_good_checkpoint_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ends: Callable[..., None], why: str
) -> None:
    with suppress(OfTheLoop), life(tmp_path, terms_of(*DILOCO)) as (peer, problem):
        problem.train(peer, INTERVAL + 1)
        ends(peer, problem)
    assert f"no last checkpoint: {why}" in caplog.text
    assert read_status(tmp_path).state not in ENDED
    with life(tmp_path, terms_of(*DILOCO)) as (peer, problem):
        assert peer.inner_steps < INTERVAL + 1
        assert problem.flat().isfinite().all()


def test_a_checkpoint_that_fails_does_not_hide_the_error_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> bool:
        raise DiskError("no room")

    with pytest.raises(OfTheLoop), life(tmp_path, terms_of(*DILOCO)) as (peer, problem):  # noqa: PT012
        problem.train(peer, 2)
        monkeypatch.setattr("decentral.peer.participation.save_now", full)
        raise OfTheLoop
    assert "no last checkpoint: DiskError: no room" in caplog.text


def test_a_stop_without_a_last_checkpoint_says_so_and_not_that_everything_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outer_loop, "APPLIED", 0.3)
    manifest, disk, events = terms_of("diloco", 1), SlowDisk(monkeypatch, "journal"), list[dict[str, Any]]()

    def hear(event: dict[str, Any]) -> None:
        events.append(event)
        if event["event"] == "checkpoint_failed":
            disk.open.set()

    with life(tmp_path, manifest, observer=hear) as (peer, problem):
        problem.train(peer, INTERVAL - 1)
        disk.shut()
        problem.step()
        until(lambda: peer.swarm.node.driver.head.anchor is None)
    assert [event["why"] for event in told(events, "checkpoint_failed")] == ["a commit was still being applied"]
    assert "no last checkpoint: a commit was still being applied" in caplog.text
    assert read_status(tmp_path).state not in ENDED
    with life(tmp_path, manifest) as (peer, _):
        assert peer.round == 1, "a durable commit was lost"
