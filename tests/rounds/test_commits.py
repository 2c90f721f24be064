"""What goes on while a branch is taken over: reading it, hashing it and writing it down take time."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from types import SimpleNamespace

import anyio
import pytest
import torch
import trio
import trio.testing

from decentral.consensus.chain import Branch
from decentral.errors import DiskError
from decentral.flow.waiting import in_thread, inline
from decentral.replica.pair_step import GossipStep
from decentral.replica.replica import OuterStep
from decentral.rounds import commits
from decentral.rounds.commits import StepAhead
from decentral.rounds.driver import Driver
from decentral.rounds.local_state import Tasks
from decentral.training.live_side import LiveSide
from decentral.training.outer_loop import anchors_without_debt
from decentral.training.schedule import SyncSchedule
from tests.kit.blocks import two_blocks
from tests.kit.gossip_learners import Learner
from tests.kit.nodes import scene, small_terms, tiny_model
from tests.kit.partitions import SPARSE, exact_terms, heavier, next_commit


def while_it_is_written(driver, work) -> None:
    """Have ``work`` done while the disk writes what is adopted."""
    plain = driver.state.offload

    async def offload(what, *args):
        if what == driver.state.ledger.adopt:
            await work()
        return await plain(what, *args)

    driver.state.offload = offload


async def at_rest(lab, kind=Learner):
    """Two peers with nothing under way; the first of them."""
    await lab.start([kind] * 2, rounds=3)
    await lab.rest()
    await lab.until(lambda: all(member.is_up_to_date for member in lab.members))
    return lab.members[0]


@scene(lambda: exact_terms(small_terms, SPARSE), make_model=tiny_model)
async def test_a_debt_that_is_dropped_meanwhile_is_not_owed_again(lab):
    member = await at_rest(lab)
    driver, replica = member.node.driver, member.node.replica
    replica.feedback[0] = {"debt": torch.ones(lab.schema.fragments[0].numel)}

    async def start_over():
        assert (await anchors_without_debt(member.node, driver.head.hash, [0])).debts

    while_it_is_written(driver, start_over)
    head, branch = next_commit(driver, frames=(), contributors=())
    await driver.adoption.adopt(head, replica.shared_tensors(), branch)
    assert driver.head.hash == head.hash
    assert "debt" not in replica.feedback[0]


@scene(
    lambda: small_terms("ad_psgd").changed(compressor={"chain": "int8", "feedback": "ef(beta=1.0)"}),
    peers=2,
    make_model=tiny_model,
)
async def test_what_a_pair_books_meanwhile_stays(lab):
    await lab.until(lambda: all(len(member.swaps) >= 3 for member in lab.members))
    member = lab.members[0]
    driver, replica, booked = member.node.driver, member.node.replica, []

    async def swap():
        count = len(member.swaps)
        await lab.until(lambda: len(member.swaps) > count and member.swaps[-1].partner is not None)
        booked.append(replica.feedback[0])

    while_it_is_written(driver, swap)
    head = heavier(driver.head, b"b")
    await driver.adoption.adopt(head, {}, Branch(driver.head, (head,)))
    assert booked[0]["debt"].norm() > 0
    assert replica.feedback[0] is booked[0]


class InTwo(Learner):
    """Whose model lies in two fragments."""

    def __init__(self, lab, number, founder):
        super().__init__(lab, number, founder)
        live = LiveSide(self.model, self.inner, self.signer.peer, lab.schema)
        self.schedule = SyncSchedule(2, 0, self.node.replica.method, bytes(32), 2, live=live)


@scene(lambda: exact_terms(small_terms, SPARSE).changed(outer={"fragments": 2}), make_model=two_blocks)
async def test_a_live_model_is_in_step_with_a_branch_once_all_its_fragments_are(lab):
    """Saved or offered before, the progress of the others would count as this peer's, backwards."""
    member = await at_rest(lab, InTwo)
    driver, seen = member.node.driver, len(member.all_updates)
    tensors = {name: one_N + 1.0 for name, one_N in driver.state.replica.shared_tensors().items()}
    head, branch = next_commit(driver, frames=(), contributors=())
    await driver.adoption.adopt(head, tensors, branch)
    moves, schedule, before = member.all_updates[seen:], member.schedule, member.schedule.seen
    live = [member.model.read(f).clone() for f in (0, 1)]
    assert [move.fragment for move in moves] == [0, 1]
    schedule.merge(moves[0], member.model)
    assert schedule.seen == before != head.hash
    schedule.merge(moves[1], member.model)
    assert schedule.seen == head.hash
    assert all(torch.equal(member.model.read(f), live[f] + 1.0) for f in (0, 1))


@scene("noloco", peers=2, make_model=tiny_model)
async def test_a_pair_whose_replica_was_merged_meanwhile_leaves_it(lab):
    """The step was made from the replica before, and took the place of the merged one."""
    await lab.until(lambda: all(len(member.swaps) >= 3 for member in lab.members))
    member, merged = lab.members[0], []
    state, plain = member.node.driver.state, member.node.driver.state.offload

    async def offload(what, *args):
        made = await plain(what, *args)
        if isinstance(made, GossipStep) and not merged:
            merged.append(torch.full_like(made.after_N, 7.0))
            state.replica.anchors[0] = merged[0]
            state.replica.digests[0] = b"m" * 32
        return made

    state.offload, count = offload, len(member.swaps)
    await lab.until(lambda: len(member.swaps) > count)
    swapped = member.swaps[count]
    assert swapped.unmoved
    assert swapped.after_N is merged[0]
    assert state.replica.digests[0] == b"m" * 32


# ---- test ahead ----
#
# An outer step is made while votes are on their way: once, of what the commit finds, and its errors are not lost.


@scene(make_model=tiny_model)
async def test_each_outer_step_is_made_once_and_the_leaders_before_the_commit(lab, monkeypatch):
    told, step, decide = [], commits.outer_step, Driver._decide

    def noted(replica, record, frames, decoded=None):
        told.append(("made", id(replica), record.hash))
        return step(replica, record, frames, decoded)

    async def decided(driver, commit, known_since):
        told.append(("decided", id(driver.state.replica), commit.record.hash))
        await decide(driver, commit, known_since)

    monkeypatch.setattr(commits, "outer_step", noted)
    monkeypatch.setattr(Driver, "_decide", decided)
    await lab.start([Learner] * 3, rounds=4)
    lab.check_equal()
    made = Counter((peer, record) for what, peer, record in told if what == "made")
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
        self.replica = SimpleNamespace(anchors=[torch.zeros(2)], states=[{}])
        self.sums = SimpleNamespace(results=SimpleNamespace(by_frame=dict))
        self.offload, self.tasks = inline, Tasks(lambda event, fields: None)
        self.made: list[bytes] = []
        self.error: Exception | None = None

    def outer_step(self, replica, record, frames, decoded):
        assert replica is self.replica
        self.made.append(record.hash)
        if self.error is not None:
            raise self.error
        anchor_N = self.replica.anchors[0]
        return OuterStep(0, anchor_N, anchor_N + 1, {}, bytes(32))


def record(name: bytes) -> SimpleNamespace:
    return SimpleNamespace(hash=name, fragment=0)


def ahead_of(*records: bytes):
    """A test of a bench whose peer begins the steps of some records ahead; ``made``: what it made when all is over."""

    def as_test(script):
        @functools.wraps(script)
        def test(monkeypatch) -> None:
            bench = Bench()
            monkeypatch.setattr(commits, "outer_step", bench.outer_step)

            async def main() -> None:
                async with anyio.create_task_group() as group:
                    bench.tasks.begin(group)
                    await script(bench, StepAhead(bench))

            trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
            assert sorted(bench.made) == sorted(records)

        del test.__wrapped__  # pytest is to see ``monkeypatch``
        return test

    return as_test


@ahead_of(b"a")
async def test_what_was_made_ahead_is_taken_and_not_made_again(bench, ahead):
    ahead.begin(record(b"a"), {})
    ahead.begin(record(b"a"), {})  # the vote is given again in a later ballot
    await trio.testing.wait_all_tasks_blocked()
    assert bench.made == [b"a"]
    step = await ahead.step(record(b"a"), {})
    assert step.after_N.tolist() == [1.0, 1.0]


@ahead_of(b"a", b"b", b"c", b"c")
async def test_what_was_made_of_another_record_or_of_an_anchor_that_moved_on_is_made_again(bench, ahead):
    ahead.begin(record(b"a"), {})
    await ahead.step(record(b"b"), {})
    ahead.begin(record(b"c"), {})
    await trio.testing.wait_all_tasks_blocked()
    bench.replica.anchors[0] = torch.ones(2)  # a branch was adopted
    step = await ahead.step(record(b"c"), {})
    assert step.after_N.tolist() == [2.0, 2.0]


@ahead_of(b"a", b"a")
async def test_an_error_ahead_of_the_commit_is_raised_by_the_commit(bench, ahead):
    bench.error = DiskError("offload /disk: No space left on device for 8 bytes")
    ahead.begin(record(b"a"), {})
    await trio.testing.wait_all_tasks_blocked()
    with pytest.raises(DiskError, match="No space left"):
        await ahead.step(record(b"a"), {})


@ahead_of(b"a")
async def test_rounds_that_end_make_nothing_ahead_and_wait_for_nothing(bench, ahead):
    bench.tasks.end()
    ahead.begin(record(b"a"), {})
    step = await ahead.step(record(b"a"), {})
    assert step.after_N.tolist() == [1.0, 1.0]


def test_a_step_that_begins_as_the_swarms_side_is_cancelled_is_made_and_nothing_waits_on(monkeypatch):
    """A peer that was shut down while it voted spun for ever: the rounds' group was not cancelled, what it is in was.

    On a thread that is a daemon: a task that spins in a shield cannot be cancelled, and would take the tests with it.
    """
    bench, decided = Bench(), []
    bench.offload = in_thread
    monkeypatch.setattr(commits, "outer_step", bench.outer_step)

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
