"""What is as long as the model is made off the event loop: leases are told and votes answered meanwhile."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator

import anyio.lowlevel
import pytest

from decentral.replica import pair_step, replica
from decentral.replica.contents import FrameContents
from decentral.replica.contribution import Outbox
from decentral.rounds import commits, gossip
from tests.kit import nodes
from tests.kit.gossip_learners import Learner
from tests.kit.nodes import scene, small_terms, tiny_model
from tests.kit.partitions import SPARSE, contributing, exact_terms, next_commit, partition, settle

LONG = [
    (replica, "digest"),
    (pair_step, "_step"),
    (gossip, "seal"),
    (Outbox, "_decode_change"),
    (FrameContents, "nonzero"),
    (commits, "owed_after"),
    (commits.Adoption, "_move"),
]
BEFORE_THE_LOOP = "__init__"  # of a replica, which no peer has yet


class Watch:
    """Calls of what takes long, by where they were made from."""

    def __init__(self) -> None:
        self.off = False
        self.made: set[str] = set()
        self.on_the_loop: set[tuple[str, str]] = set()

    async def offload(self, work: Callable, *args: object) -> object:
        await anyio.lowlevel.checkpoint()
        self.off = True
        try:
            return work(*args)
        finally:
            self.off = False

    def watched(self, name: str, work: Callable) -> Callable:
        @functools.wraps(work)
        def wrapped(*args: object, **given: object) -> object:
            caller = sys._getframe(1)
            while caller.f_code.co_name.startswith("<"):
                caller = caller.f_back
            self.made.add(name)
            if not self.off and caller.f_code.co_name != BEFORE_THE_LOOP:
                self.on_the_loop.add((name, caller.f_code.co_name))
            return work(*args, **given)

        return wrapped


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    seen = Watch()
    for place, name in LONG:
        monkeypatch.setattr(place, name, seen.watched(name, getattr(place, name)))
    monkeypatch.setattr(nodes, "inline", seen.offload)
    yield seen
    assert not seen.on_the_loop


@scene("noloco", peers=3, make_model=tiny_model)
async def test_steps_of_pairs_and_of_one_alone(lab, watch):
    await lab.until(lambda: all(len(member.swaps) >= 8 for member in lab.members))
    partners = {swapped.partner for member in lab.members for swapped in member.swaps}
    assert None in partners
    assert len(partners) > 1
    assert {"_step", "digest", "seal"} <= watch.made


@scene(lambda: exact_terms(small_terms, SPARSE), make_model=tiny_model)
async def test_a_snapshot_and_a_branch_that_is_taken_over(lab, watch):
    _, lost = await partition(lab, [Learner] * 3, 1, "many")
    await settle(lab)
    assert lost[0].happened("healed")
    lab.add(kind=Learner)
    await lab.all_members()
    assert {"digest", "_decode_change", "_move"} <= watch.made


@pytest.mark.parametrize("exchange", ["gather", "reduce"])
@scene(lambda exchange: exact_terms(small_terms, SPARSE, exchange), make_model=tiny_model)
async def test_what_a_commit_names_of_a_previous_life(lab, watch, exchange):
    member = await contributing(lab, 2)
    driver, seen = member.node.driver, len(member.all_updates)
    await lab.until(
        lambda: driver.state.pending is not None and (driver.state.pending.slices or driver.state.pending.encoded)
    )
    driver.state.pending = None  # as in a process that was started again
    await lab.until(lambda: any(update.taken_N is not None for update in member.all_updates[seen:]))
    assert ("nonzero" if exchange == "gather" else "owed_after") in watch.made


@scene(lambda: exact_terms(small_terms, SPARSE, "reduce"), make_model=tiny_model)
async def test_what_an_owner_owes_on_a_branch(lab, watch):
    member = await contributing(lab, 2)
    driver = member.node.driver
    newest = next(commit.record for commit in reversed(member.log) if commit.record.partition)
    head, branch = next_commit(driver, newest)
    await driver.adoption.adopt(head, {}, branch)
    assert "owed_after" in watch.made
