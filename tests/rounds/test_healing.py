"""Two branches of one run: which one wins, what becomes of the other's progress, and that both are told."""

from __future__ import annotations

from collections import OrderedDict

import anyio
import pytest
import torch

from decentral.consensus.chain import Branch, contributions
from decentral.consensus.round_state import references
from decentral.training.reporting import Reporter
from tests.kit.gossip_learners import Learner
from tests.kit.nodes import scene, small_terms, tiny_model
from tests.kit.partitions import (
    DENSE,
    SPARSE,
    check_progress,
    contributing,
    exact_terms,
    heavier,
    next_commit,
    partition,
    settle,
    weight,
)


class Heavy(Learner):
    tokens = 50


@pytest.mark.parametrize(
    ("compressor", "exchange", "few", "many", "heavy"),
    [
        (SPARSE, "gather", 2, 3, "many"),
        (DENSE, "gather", 2, 3, "few"),
        (DENSE, "reduce", 1, 2, "many"),
    ],
)
@scene(lambda compressor, exchange: exact_terms(small_terms, compressor, exchange), make_model=tiny_model)
async def test_after_a_partition_the_majority_wins_however_heavy_the_others_and_no_progress_is_lost(
    lab, compressor, exchange, few, many, heavy
):
    kinds = [Heavy if heavy == "few" else Learner] * few + [Learner] * many
    won, lost = await partition(lab, kinds, few, heavy)
    await won[0].node.catch_up._catch_up(lost[0].signer.peer)  # whoever looks first
    await settle(lab)
    assert not any(member.happened("healed") for member in won)
    for member in lost:
        (healed,) = member.happened("healed")
        assert healed["given_up"] >= healed["kept"] >= 2
        assert healed["steps"] == 4 * healed["kept"]
    check_progress(lab, won[0].log)


@pytest.mark.parametrize("compressor", [SPARSE, pytest.param(DENSE, marks=pytest.mark.long)])
@scene(
    lambda compressor: exact_terms(small_terms, compressor),
    peers=[Heavy] * 2 + [Learner] * 2,
    rounds=2,
    make_model=tiny_model,
)
async def test_of_two_sides_without_a_majority_the_heavier_wins_and_no_progress_is_lost(lab, compressor):
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


class Counted(Learner):
    """Counts its rounds as a peer does for its status."""

    def __init__(self, lab, number, founder):
        super().__init__(lab, number, founder)
        self.reporter = Reporter(lambda event, fields: None, self.signer.peer, anyio.current_time)

    def round_ended(self, update, *, of_pairs=False):
        self.reporter.round_ended(update, of_pairs=of_pairs)

    def branch_left(self, outer_step):
        self.reporter.branch_left(outer_step)


@scene(lambda: exact_terms(small_terms, SPARSE), make_model=tiny_model)
async def test_after_a_partition_nobody_counts_contributions_to_rounds_that_were_given_up(lab):
    """A peer of the lighter side had contributed to 95 of the last 100, and the run had five of them."""
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


class Told(Learner):
    """Keeps what its absences cost."""

    def __init__(self, lab, number, founder):
        super().__init__(lab, number, founder)
        self.absences = []

    def away(self, away):
        super().away(away)
        self.absences.append(away)


def steps_alone(swarm):
    """What counts of the inner steps of two peers that could not see each other for so long."""
    return scene(lambda **_: exact_terms(small_terms, SPARSE), peers=[Told] * 2, rounds=2, make_model=tiny_model)(swarm)


@steps_alone
async def test_of_two_that_meet_before_either_went_on_all_steps_count_as_one_contribution(lab):
    lab.cut(*([member] for member in lab.members))
    await anyio.sleep(2.0)  # they would be given up after 4
    lab.heal(*([member] for member in lab.members))
    await lab.rounds(3)
    assert not any(member.happened("shrunk") for member in lab.members)
    counted = [away.counted for member in lab.members for away in member.absences]
    assert all(one > 0 for one in counted), [member.absences for member in lab.members]
    await settle(lab)
    check_progress(lab, lab.members[0].log)


@pytest.mark.parametrize("rounds", [1, 6])
@steps_alone
async def test_of_two_that_went_on_apart_the_lighter_counts_as_one_round_or_not_at_all(lab, rounds):
    lab.cut(*([member] for member in lab.members))
    await lab.until(lambda: all(member.happened("shrunk") for member in lab.members))
    fork = min(member.node.driver.state.went_on.outer_step for member in lab.members)
    await lab.until(lambda: max(member.rounds for member in lab.members) >= fork + rounds)
    await lab.rest()
    lab.heal(*([member] for member in lab.members))
    await lab.until(lambda: any(member.happened("healed") for member in lab.members))
    for member in lab.members:
        member.idle = False
    await settle(lab)
    (loser,) = (member for member in lab.members if member.happened("healed"))
    for away in loser.absences:
        assert away.counted == (0 if away.missed > 2 or away.steps > 3 * loser.interval else loser.interval), away
    assert loser.absences[-1].missed >= rounds
    assert loser.node.driver.state.went_on is None
    check_progress(lab, lab.members[0].log)


async def in_flight(lab, kind=None):
    """A member whose contribution waits for that of another one, which never comes, and its own offer."""
    member, other = lab.add(kind=kind), lab.add()
    other.idle = True
    driver = member.node.driver
    await lab.until(lambda: driver.state.pending is not None and len(driver.head.members) == 2)
    return member, next(iter(references([driver.state.me], driver.machine.state.round.offers)))


@scene(lambda: exact_terms(small_terms, SPARSE), make_model=tiny_model)
async def test_a_branch_that_took_the_contribution_in_flight_is_booked_as_its_commit_would_have_been(lab):
    """What was sent of the debt was taken from the progress: the sum was right, until a crash dropped one of them."""
    member, mine = await in_flight(lab)
    driver, pending = member.node.driver, member.node.driver.state.pending
    driver.state.replica.feedback[0] = {"debt": torch.ones(lab.schema.fragments[0].numel)}
    head, branch = next_commit(driver, frames=(mine,))
    before_N, seen = driver.state.replica.anchors[0], len(member.all_updates)
    await driver.adoption.adopt(head, {}, branch)
    assert torch.equal(driver.state.replica.feedback[0]["debt"], pending.encoded.feedback["debt"])
    assert torch.equal(member.all_updates[seen].before_N, before_N - pending.gradient_N)
    assert member.all_updates[seen].took


class Slow(Learner):
    interval = 16

    def __init__(self, lab, number, founder):
        super().__init__(lab, number, founder)
        self.schedule._lengthens = True


def in_time():
    return exact_terms(small_terms, SPARSE).changed(inner={"pace": "clock", "seconds": 4.4 * Slow.pace})


@scene(in_time, make_model=tiny_model)
async def test_a_branch_that_took_a_lengthened_change_takes_from_the_progress_what_was_learnt(lab):
    """It took more than there was, and the rest was learnt backwards."""
    member, mine = await in_flight(lab, Slow)
    driver, pending = member.node.driver, member.node.driver.state.pending
    head, branch = next_commit(driver, frames=(mine,))
    before_N, seen = driver.state.replica.anchors[0], len(member.all_updates)
    learnt_N = before_N - member.model.read(0)
    await driver.adoption.adopt(head, {}, branch)
    assert learnt_N.norm() > 0
    assert torch.equal(pending.gradient_N, 4 * learnt_N)
    assert torch.equal(member.all_updates[seen].before_N, before_N - learnt_N)


@scene(lambda: exact_terms(small_terms, SPARSE), make_model=tiny_model)
async def test_what_was_reclaimed_from_a_branch_is_dropped_when_that_branch_may_have_come_back(lab):
    """It was owed again, and then moved the anchor a second time: the branch went on elsewhere and grew heavier."""
    member = await contributing(lab, 2)
    driver = member.node.driver
    start = driver.machine.state.history.newest_of(reversed(driver.machine.state.history.locator()))
    second = heavier(driver.head, b"b")
    driver.state.pending = None
    await driver.adoption.adopt(second, {}, Branch(start, (second,)))
    assert member.all_updates[-1].reclaimed_steps > 0
    driver.state.pending = None
    await driver.adoption.adopt(heavier(second, b"c"), {}, Branch(None))
    assert torch.equal(member.all_updates[-1].taken_N, torch.ones(lab.schema.fragments[0].numel, dtype=torch.bool))


async def apart(lab, count: int, rounds: int) -> None:
    """So many members go on alone, each for itself, until each has made so many rounds, and train no more."""
    await lab.start(count, rounds=2)
    for number, member in enumerate(lab.members):
        lab.cut([member], lab.members[number + 1 :])
    await lab.reach(lab.members, rounds)
    await lab.rest()


@scene(make_model=tiny_model)
async def test_a_fork_before_which_the_other_remembers_nothing_is_found_between_the_places_that_are_named(lab):
    """A peer that took a snapshot knows the chain from there on, and the places that are named lie apart."""
    await apart(lab, 2, 30)
    one, other = (member.node for member in lab.members)
    ours, theirs = (node.driver.machine.state.history for node in (one, other))
    fork = max(h.round for h in ours._heads.values() if theirs.at((h.round, h.hash)))
    theirs._heads = OrderedDict((r, head) for r, head in theirs._heads.items() if r >= fork)
    assert theirs.newest_of(ours.locator()) is None
    lab.heal(lab.members[:1], lab.members[1:])
    branch = await one.catch_up._branch_to(other.driver.state.me, other.driver.head)
    assert branch.shared is not None
    assert branch.shared.round == fork
    assert branch.heads[-1].hash == other.driver.head.hash


@pytest.mark.parametrize("third", [pytest.param(0, marks=pytest.mark.long), 1, pytest.param(2, marks=pytest.mark.long)])
@scene(make_model=tiny_model)
async def test_two_that_do_not_take_the_branch_of_the_third_compare_theirs(lab, third):
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


def refuse(catch_up, peer: bytes) -> None:
    """It does not take the branch of ``peer``, as if that ranked lower."""
    adopt = catch_up._adopt_if_better

    async def unless_it_is_that(holder: bytes) -> bool:
        if holder == peer:
            catch_up.driver.watch.note_parted(peer)
            return False
        return await adopt(holder)

    catch_up._adopt_if_better = unless_it_is_that


@scene(peers=3, rounds=2, make_model=tiny_model)
async def test_whoever_stands_on_a_chain_that_is_refused_is_silent_on_this_one(lab):
    """Two of four waited for the vote of the third, which had gone over to the chain that the fourth showed them."""
    for member in lab.members:
        member.idle = True
    await anyio.sleep(5.0)
    one, *others = (member.node.driver for member in lab.members)
    commits = list(one.machine.state.recent.values())
    lab.members[0].node.catch_up._tell_refused(others[0].state.me, commits)
    assert one.watch._parted == {other.state.me for other in others}
