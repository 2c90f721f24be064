"""An outer step is made while votes are on their way: once, of what the commit finds, and its errors are not lost."""

from __future__ import annotations

import threading
from collections import Counter
from types import SimpleNamespace

import anyio
import pytest
import torch
import trio
import trio.testing

from decentral.errors import DiskError
from decentral.flow.schedule import in_thread, inline
from decentral.replica.replica import OuterStep, Replica
from decentral.rounds.commits import StepAhead
from decentral.rounds.driver import Driver
from decentral.rounds.local_state import Tasks
from tests.lab.learners import Learner
from tests.lab.nodes import tiny_model


def test_each_outer_step_is_made_once_and_the_leaders_before_the_commit(run_lab, terms, monkeypatch):
    told, step, decide = [], Replica.outer_step, Driver._decide

    def noted(replica, record, frames, decoded=None):
        told.append(("made", id(replica), record.hash))
        return step(replica, record, frames, decoded)

    async def decided(driver, commit):
        told.append(("decided", id(driver.state.replica), commit.record.hash))
        await decide(driver, commit)

    monkeypatch.setattr(Replica, "outer_step", noted)
    monkeypatch.setattr(Driver, "_decide", decided)

    async def script(lab):
        for _ in range(3):
            lab.add(kind=Learner)
        await lab.all_members()
        await lab.rounds(4)
        lab.check_equal()

    run_lab(terms("sparseloco"), script, make_model=tiny_model)
    made = Counter(key for what, *key_ in told if what == "made" for key in [tuple(key_)])
    assert made
    assert set(made.values()) == {1}
    ahead = {record for place, (what, _, record) in enumerate(told) if what == "made" and before(told, place)}
    assert ahead == {record for what, _, record in told if what == "made"}  # of each record, by somebody


def before(told: list[tuple[str, int, bytes]], place: int) -> bool:
    """Whether the peer that made a step there had not decided on its record yet."""
    _, peer, record = told[place]
    return ("decided", peer, record) not in told[:place]


class Bench:
    """A peer's state, as far as a step ahead looks at it."""

    def __init__(self) -> None:
        self.replica = SimpleNamespace(anchors=[torch.zeros(2)], states=[{}], outer_step=self.outer_step)
        self.results = SimpleNamespace(by_frame=dict)
        self.offload, self.tasks = inline, Tasks(lambda event, fields: None)
        self.made: list[bytes] = []
        self.error: Exception | None = None

    def outer_step(self, record, frames, decoded):
        self.made.append(record.hash)
        if self.error is not None:
            raise self.error
        anchor_N = self.replica.anchors[0]
        return OuterStep(0, anchor_N, anchor_N + 1, {}, bytes(32))


def record(name: bytes) -> SimpleNamespace:
    return SimpleNamespace(hash=name, fragment=0)


def play(script) -> Bench:
    bench = Bench()

    async def main() -> None:
        async with anyio.create_task_group() as group:
            bench.tasks.begin(group)
            await script(bench, StepAhead(bench))

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return bench


def test_what_was_made_ahead_is_taken_and_not_made_again():
    async def script(bench, ahead):
        ahead.begin(record(b"a"), {})
        ahead.begin(record(b"a"), {})  # the vote is given again in a later ballot
        await trio.testing.wait_all_tasks_blocked()
        assert bench.made == [b"a"]
        step = await ahead.step(record(b"a"), {})
        assert step.after_N.tolist() == [1.0, 1.0]

    assert play(script).made == [b"a"]


def test_what_was_made_of_another_record_or_of_an_anchor_that_moved_on_is_made_again():
    async def script(bench, ahead):
        ahead.begin(record(b"a"), {})
        await ahead.step(record(b"b"), {})
        ahead.begin(record(b"c"), {})
        await trio.testing.wait_all_tasks_blocked()
        bench.replica.anchors[0] = torch.ones(2)  # a branch was adopted
        step = await ahead.step(record(b"c"), {})
        assert step.after_N.tolist() == [2.0, 2.0]

    assert sorted(play(script).made) == [b"a", b"b", b"c", b"c"]


def test_an_error_ahead_of_the_commit_is_raised_by_the_commit():
    async def script(bench, ahead):
        bench.error = DiskError("offload /disk: No space left on device for 8 bytes")
        ahead.begin(record(b"a"), {})
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(DiskError, match="No space left"):
            await ahead.step(record(b"a"), {})

    assert play(script).made == [b"a", b"a"]


def test_rounds_that_end_make_nothing_ahead_and_wait_for_nothing():
    async def script(bench, ahead):
        bench.tasks.end()
        ahead.begin(record(b"a"), {})
        step = await ahead.step(record(b"a"), {})
        assert step.after_N.tolist() == [1.0, 1.0]

    assert play(script).made == [b"a"]


def test_a_step_that_begins_as_the_swarms_side_is_cancelled_is_made_and_nothing_waits_on():
    """A peer that was shut down while it voted spun for ever: the rounds' group was not cancelled, what it is in was.

    On a thread that is a daemon: a task that spins in a shield cannot be cancelled, and would take the tests with it.
    """
    bench, decided = Bench(), []
    bench.offload = in_thread

    async def rounds(under_way: anyio.Event, written: anyio.Event, over: anyio.Event) -> None:
        async with anyio.create_task_group() as group:
            bench.tasks.begin(group)
            with anyio.CancelScope(shield=True):  # as `Steps.take` carries effects out
                under_way.set()
                await written.wait()
                ahead = StepAhead(bench)
                ahead.begin(record(b"a"), {})
                decided.append(await ahead.step(record(b"a"), {}))
                over.set()

    async def main() -> None:
        under_way, written, over = anyio.Event(), anyio.Event(), anyio.Event()
        async with anyio.create_task_group() as swarm:
            swarm.start_soon(rounds, under_way, written, over)
            await under_way.wait()
            swarm.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                for _ in range(20):  # until everybody who can be told has been
                    await anyio.sleep(0)
                written.set()
                await over.wait()

    thread = threading.Thread(target=lambda: anyio.run(main), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert [step.after_N.tolist() for step in decided] == [[1.0, 1.0]]
    assert bench.made == [b"a"]
