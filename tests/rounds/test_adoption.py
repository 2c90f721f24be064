"""What goes on while a branch is taken over: reading it, hashing it and writing it down take time."""

from __future__ import annotations

from dataclasses import replace

import torch

from decentral.consensus.chain import Branch
from decentral.replica.pair_step import GossipStep
from decentral.training.live_side import LiveSide
from decentral.training.outer_loop import anchors_without_debt
from decentral.training.schedule import SyncSchedule
from tests.lab.learners import Learner
from tests.lab.nodes import tiny_model
from tests.rounds.test_healing import SPARSE, exact_terms, following


def while_it_is_written(driver, work) -> None:
    """Have ``work`` done while the disk writes what is adopted."""
    plain = driver.state.offload

    async def offload(what, *args):
        if what == driver.state.ledger.adopt:
            await work()
        return await plain(what, *args)

    driver.state.offload = offload


def next_head(driver):
    """A commit after the head that took nothing from this peer, and the way there."""
    newest = driver.machine.state.recent[driver.head.round].record
    told = {**following(driver.head), "fragment": driver.head.fragment(len(driver.state.replica.anchors))}
    record = replace(newest, **told, frames=(), contributors=())
    head = replace(driver.head.extended(record), anchor=driver.head.anchor)
    return head, Branch(driver.head, (head,), (record,))


async def at_rest(lab, kind=Learner):
    """Two peers with nothing under way; the first of them."""
    for _ in range(2):
        lab.add(kind=kind)
    await lab.all_members()
    await lab.rounds(3)
    for member in lab.members:
        member.idle = True
    await lab.until(lambda: all(m.node.driver.pending is None and m.is_up_to_date for m in lab.members))
    return lab.members[0]


def test_a_debt_that_is_dropped_meanwhile_is_not_owed_again(run_lab, terms):
    async def script(lab):
        member = await at_rest(lab)
        driver, replica = member.node.driver, member.node.replica
        replica.feedback[0] = {"debt": torch.ones(lab.schema.fragments[0].numel)}

        async def start_over():
            assert (await anchors_without_debt(member.node, driver.head.hash, [0])).debts

        while_it_is_written(driver, start_over)
        head, branch = next_head(driver)
        await driver.adoption.adopt(head, replica.shared_tensors(), branch)
        assert driver.head.hash == head.hash
        assert "debt" not in replica.feedback[0]

    run_lab(exact_terms(terms, SPARSE), script, make_model=tiny_model)


def test_what_a_pair_books_meanwhile_stays(run_lab, terms):
    async def script(lab):
        for _ in range(2):
            lab.add()
        await lab.all_members()
        await lab.until(lambda: all(len(member.swaps) >= 3 for member in lab.members))
        member = lab.members[0]
        driver, replica, booked = member.node.driver, member.node.replica, []

        async def swap():
            count = len(member.swaps)
            await lab.until(lambda: len(member.swaps) > count and member.swaps[-1].partner is not None)
            booked.append(replica.feedback[0])

        while_it_is_written(driver, swap)
        head = replace(driver.head, round=driver.head.round + 1, tokens=driver.head.tokens + 1, hash=b"b" * 32)
        await driver.adoption.adopt(head, {}, Branch(driver.head, (head,)))
        assert booked[0]["debt"].norm() > 0
        assert replica.feedback[0] is booked[0]

    terms_of_a_debt = {"chain": "int8", "feedback": "ef(beta=1.0)"}
    run_lab(terms("ad_psgd").changed(compressor=terms_of_a_debt), script, make_model=tiny_model)


class InTwo(Learner):
    """Whose model lies in two fragments."""

    def __init__(self, lab, number, founder):
        super().__init__(lab, number, founder)
        live = LiveSide(self.model, self.inner, self.signer.peer, lab.schema)
        self.schedule = SyncSchedule(2, 0, self.node.replica.method, bytes(32), 2, live=live)


def in_two() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))


def test_a_live_model_is_in_step_with_a_branch_once_all_its_fragments_are(run_lab, terms):
    """Saved or offered before, the progress of the others would count as this peer's, backwards."""

    async def script(lab):
        member = await at_rest(lab, InTwo)
        driver, seen = member.node.driver, len(member.all_updates)
        tensors = {name: one_N + 1.0 for name, one_N in driver.state.replica.shared_tensors().items()}
        head, branch = next_head(driver)
        await driver.adoption.adopt(head, tensors, branch)
        moves, schedule, before = member.all_updates[seen:], member.schedule, member.schedule.seen
        live = [member.model.read(f).clone() for f in (0, 1)]
        assert [move.fragment for move in moves] == [0, 1]
        schedule.merge(moves[0], member.model)
        assert schedule.seen == before != head.hash
        schedule.merge(moves[1], member.model)
        assert schedule.seen == head.hash
        assert all(torch.equal(member.model.read(f), live[f] + 1.0) for f in (0, 1))

    run_lab(exact_terms(terms, SPARSE).changed(outer={"fragments": 2}), script, make_model=in_two)


def test_a_pair_whose_replica_was_merged_meanwhile_leaves_it(run_lab, terms):
    """The step was made from the replica before, and took the place of the merged one."""

    async def script(lab):
        for _ in range(2):
            lab.add()
        await lab.all_members()
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

    run_lab(terms("noloco"), script, make_model=tiny_model)
