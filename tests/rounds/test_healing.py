"""Two branches of one run: which one wins, what becomes of the other's progress, and that both are told."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import anyio
import pytest
import torch

from decentral.consensus.chain import Branch, contributions
from decentral.consensus.round_state import references
from decentral.training.reporting import Reporter
from tests.kit.gossip_learners import Learner
from tests.kit.nodes import tiny_model
from tests.kit.partitions import DENSE, SPARSE, check_progress, exact_terms, following, partition, settle, weight


class Heavy(Learner):
    tokens = 50


@pytest.mark.parametrize(("compressor", "heavier"), [(SPARSE, "many"), (DENSE, "few")])
def test_after_a_partition_the_majority_wins_however_heavy_the_others_and_no_progress_is_lost(
    run_lab, terms, compressor, heavier
):
    async def script(lab):
        few = Heavy if heavier == "few" else Learner
        won, lost = await partition(lab, [few] * 2 + [Learner] * 3, 2, heavier)
        await won[0].node.catch_up._catch_up(lost[0].signer.peer)  # whoever looks first
        await settle(lab)
        assert not any(member.happened("healed") for member in won)
        for member in lost:
            (healed,) = member.happened("healed")
            assert healed["given_up"] >= healed["kept"] >= 2
            assert healed["steps"] == 4 * healed["kept"]
        check_progress(lab, won[0].log)

    run_lab(exact_terms(terms, compressor), script, make_model=tiny_model)


@pytest.mark.parametrize("compressor", [SPARSE, DENSE])
def test_of_two_sides_without_a_majority_the_heavier_wins_and_no_progress_is_lost(run_lab, terms, compressor):
    async def script(lab):
        for kind in [Heavy] * 2 + [Learner] * 2:
            lab.add(kind=kind)
        await lab.all_members()
        await lab.rounds(2)
        won, lost = lab.members[:2], lab.members[2:]
        lab.cut(won, lost)
        fork = max(member.rounds for member in lab.members)
        await lab.until(lambda: all(m.rounds >= fork + 2 for m in lab.members) and weight(won) > 1.2 * weight(lost))
        assert all(member.happened("shrunk") for member in lab.members)
        lab.heal(won, lost)
        await settle(lab)
        assert not any(member.happened("healed") for member in won)
        assert all(member.happened("healed") for member in lost)
        check_progress(lab, won[0].log)

    run_lab(exact_terms(terms, compressor), script, make_model=tiny_model)


class Counted(Learner):
    """Counts its rounds as a peer does for its status."""

    def __init__(self, lab, number, founder):
        super().__init__(lab, number, founder)
        self.reporter = Reporter(lambda event, fields: None, self.signer.peer, anyio.current_time)

    def round_ended(self, update, *, of_pairs=False):
        self.reporter.round_ended(update, of_pairs=of_pairs)

    def branch_left(self, outer_step):
        self.reporter.branch_left(outer_step)


def test_after_a_partition_nobody_counts_contributions_to_rounds_that_were_given_up(run_lab, terms):
    """A peer of the lighter side had contributed to 95 of the last 100, and the run had five of them."""

    async def script(lab):
        won, lost = await partition(lab, [Counted] * 3, 1, "many")
        await settle(lab)
        chain = [commit.record for commit in won[0].log]
        for member in (*won, *lost):
            named = sum(member.signer.peer in {ref.peer for ref in contributions(record)} for record in chain)
            assert 2 <= sum(member.reporter.counters.outcomes) <= named
        assert all(len(member.reporter.counters.outcomes) < len(won[0].reporter.counters.outcomes) for member in lost)
        for member in lost:
            (healed,) = member.happened("healed")
            (parted,) = {one.parted for one in member.all_updates if one.adopted}
            assert healed["parted"] == parted > 0

    run_lab(exact_terms(terms, SPARSE), script, make_model=tiny_model)


def test_what_a_peer_gave_to_reduced_rounds_survives_as_well(run_lab, terms):
    async def script(lab):
        won, lost = await partition(lab, [Learner] * 3, 1, "many")
        await settle(lab)
        assert [healed["kept"] >= 2 for healed in lost[0].happened("healed")] == [True]
        check_progress(lab, won[0].log)

    run_lab(exact_terms(terms, DENSE, "reduce"), script, make_model=tiny_model)


def test_a_branch_that_took_the_contribution_in_flight_is_booked_as_its_commit_would_have_been(run_lab, terms):
    """What was sent of the debt was taken from the progress: the sum was right, until a crash dropped one of them."""

    async def script(lab):
        member, other = lab.add(), lab.add()
        other.idle = True  # its offer is waited for
        await lab.until(lambda: member.node.driver.pending is not None and len(member.node.driver.head.members) == 2)
        driver, pending, debt_N = (
            member.node.driver,
            member.node.driver.pending,
            torch.ones(lab.schema.fragments[0].numel),
        )
        driver.state.replica.feedback[0] = {"debt": debt_N}
        mine = next(iter(references([driver.me], driver.machine.state.round.offers)))
        newest = driver.machine.state.recent[driver.head.round].record
        record = replace(newest, **following(driver.head), frames=(mine,))
        head = replace(driver.head.extended(record), anchor=driver.head.anchor)
        before_N, seen = driver.state.replica.anchors[0], len(member.all_updates)
        await driver.adoption.adopt(head, {}, Branch(driver.head, (head,), (record,)))
        assert torch.equal(driver.state.replica.feedback[0]["debt"], pending.encoded.feedback["debt"])
        assert torch.equal(member.all_updates[seen].before_N, before_N - pending.gradient_N)
        assert member.all_updates[seen].took

    run_lab(exact_terms(terms, SPARSE), script, make_model=tiny_model)


def test_a_branch_that_took_a_lengthened_change_takes_from_the_progress_what_was_learnt(run_lab, terms):
    """It took more than there was, and the rest was learnt backwards."""

    class Slow(Learner):
        interval = 16

        def __init__(self, lab, number, founder):
            super().__init__(lab, number, founder)
            self.schedule.lengthens = True

    async def script(lab):
        member, other = lab.add(kind=Slow), lab.add()
        other.idle = True  # its offer is waited for
        await lab.until(lambda: member.node.driver.pending is not None and len(member.node.driver.head.members) == 2)
        driver, pending = member.node.driver, member.node.driver.pending
        mine = next(iter(references([driver.me], driver.machine.state.round.offers)))
        newest = driver.machine.state.recent[driver.head.round].record
        record = replace(newest, **following(driver.head), frames=(mine,))
        head = replace(driver.head.extended(record), anchor=driver.head.anchor)
        before_N, seen = driver.state.replica.anchors[0], len(member.all_updates)
        learnt_N = before_N - member.model.read(0)
        await driver.adoption.adopt(head, {}, Branch(driver.head, (head,), (record,)))
        assert learnt_N.norm() > 0
        assert torch.equal(pending.gradient_N, 4 * learnt_N)
        assert torch.equal(member.all_updates[seen].before_N, before_N - learnt_N)

    in_time = exact_terms(terms, SPARSE).changed(inner={"pace": "clock", "seconds": 4.4 * Slow.pace})
    run_lab(in_time, script, make_model=tiny_model)


def test_what_was_reclaimed_from_a_branch_is_dropped_when_that_branch_may_have_come_back(run_lab, terms):
    """It was owed again, and then moved the anchor a second time: the branch went on elsewhere and grew heavier."""

    async def script(lab):
        member = lab.add()
        lab.add()
        await lab.until(lambda: len(member.node.driver.head.members) == 2 and member.node.driver.state.contributed > 2)
        driver = member.node.driver
        start = driver.machine.state.history.newest_of(reversed(driver.machine.state.history.locator()))
        heavier = replace(driver.head, round=driver.head.round + 1, tokens=driver.head.tokens + 1, hash=b"b" * 32)
        driver.state.pending = None
        await driver.adoption.adopt(heavier, {}, Branch(start, (heavier,)))
        assert member.all_updates[-1].reclaimed_steps > 0
        driver.state.pending = None
        heaviest = replace(heavier, round=heavier.round + 1, tokens=heavier.tokens + 1, hash=b"c" * 32)
        await driver.adoption.adopt(heaviest, {}, Branch(None))
        assert torch.equal(member.all_updates[-1].taken_N, torch.ones(lab.schema.fragments[0].numel, dtype=torch.bool))

    run_lab(exact_terms(terms, SPARSE), script, make_model=tiny_model)


async def apart(lab, count: int, rounds: int) -> None:
    """So many members go on alone, each for itself, until each has made so many rounds, and train no more."""
    for _ in range(count):
        lab.add()
    await lab.all_members()
    await lab.rounds(2)
    for number, member in enumerate(lab.members):
        lab.cut([member], lab.members[number + 1 :])
    await lab.until(lambda: all(member.rounds >= rounds for member in lab.members))
    for member in lab.members:
        member.idle = True
    await lab.until(lambda: all(member.node.driver.pending is None for member in lab.members))


def test_a_fork_before_which_the_other_remembers_nothing_is_found_between_the_places_that_are_named(run_lab, terms):
    """A peer that took a snapshot knows the chain from there on, and the places that are named lie apart."""

    async def script(lab):
        await apart(lab, 2, 30)
        one, other = (member.node for member in lab.members)
        ours, theirs = (node.driver.machine.state.history for node in (one, other))
        fork = max(h.round for h in ours._heads.values() if theirs.at((h.round, h.hash)))
        theirs._heads = OrderedDict((r, head) for r, head in theirs._heads.items() if r >= fork)
        assert theirs.newest_of(ours.locator()) is None
        lab.heal(lab.members[:1], lab.members[1:])
        branch = await one.catch_up._branch_to(other.driver.me, other.driver.head)
        assert branch.shared is not None
        assert branch.shared.round == fork
        assert branch.heads[-1].hash == other.driver.head.hash

    run_lab(terms("sparseloco"), script, make_model=tiny_model)


@pytest.mark.parametrize("third", [0, 1, 2])
def test_two_that_do_not_take_the_branch_of_the_third_compare_theirs(run_lab, terms, third):
    async def script(lab):
        await apart(lab, 3, 6)
        furthest, others = lab.members[third], [m for n, m in enumerate(lab.members) if n != third]
        for member, more in ((others[0], 4), (furthest, 8)):
            goal, member.idle = member.rounds + more, False
            await lab.until(lambda member=member, goal=goal: member.rounds >= goal)
            member.idle = True
        for member in others:
            refuse(member.node.catch_up, furthest.signer.peer)
        for number, member in enumerate(lab.members):
            lab.heal([member], lab.members[number + 1 :])
        await lab.until(lambda: len({member.node.driver.head.hash for member in others}) == 1, 30.0)

    run_lab(terms("sparseloco"), script, make_model=tiny_model)


def refuse(catch_up, peer: bytes) -> None:
    """It does not take the branch of ``peer``, as if that ranked lower."""
    adopt = catch_up._adopt_if_better

    async def unless_it_is_that(holder: bytes) -> bool:
        if holder == peer:
            catch_up.driver.watch.note_parted(peer)
            return False
        return await adopt(holder)

    catch_up._adopt_if_better = unless_it_is_that


def test_whoever_stands_on_a_chain_that_is_refused_is_silent_on_this_one(run_lab, terms):
    """Two of four waited for the vote of the third, which had gone over to the chain that the fourth showed them."""

    async def script(lab):
        for _ in range(3):
            lab.add()
        await lab.all_members()
        await lab.rounds(2)
        for member in lab.members:
            member.idle = True
        await anyio.sleep(5.0)
        one, *others = (member.node.driver for member in lab.members)
        commits = list(one.machine.state.recent.values())
        lab.members[0].node.catch_up._tell_refused(others[0].me, commits)
        assert one.watch._parted == {other.me for other in others}

    run_lab(terms("sparseloco"), script, make_model=tiny_model)
