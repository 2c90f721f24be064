"""Where two chains part, and which of them is the heavier: from records alone, whatever their makers claim."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decentral.consensus.chain import (
    LENGTH,
    LOCATOR,
    Head,
    History,
    Rules,
    Voting,
    check_branch,
    count_tokens,
    retrace,
)
from decentral.consensus.leader import next_members
from decentral.consensus.paxos import Acceptor
from decentral.consensus.round_state import FETCH_AFTER, CatchUpWith
from decentral.errors import PayloadError
from decentral.wire import messages as m
from tests.kit.machines import START, A, B, C, digest_of, few_of, finish_round, join_request, record, signer_of

RULES = Rules(Voting(), 1)


def signed(wanted: m.Record, *signers: int) -> m.Commit:
    text = m.vote_text(wanted.run, wanted.epoch, wanted.round, 0, wanted.hash)
    votes = sorted((signer_of(n).peer, signer_of(n).sign(text)) for n in signers)
    return m.Commit(wanted, m.Certificate(0, tuple(votes)))


def grown(head: Head, rounds: int, tokens: dict[bytes, int], signers: tuple[int, ...] = (0, 1, 2)):
    """The chain after ``rounds`` more records, its heads and its commits."""
    heads, commits = [], []
    for _ in range(rounds):
        commits.append(signed(record(head, tokens), *signers))
        head = head.extended(commits[-1].record)
        heads.append(head)
    return head, heads, commits


def test_a_claim_of_a_quintillion_tokens_counts_as_two_typical_contributions():
    head, _, _ = grown(START, 5, {A: 100, B: 100, C: 100})
    assert head.tokens == 1500
    honest = head.extended(record(head, {A: 100, B: 100, C: 100}))
    liar = head.extended(record(head, {A: 10**18}))
    assert liar.tokens == 1500 + 200
    assert honest.weight > liar.weight


def test_the_first_claims_of_a_run_are_held_against_each_other():
    assert count_tokens(START, record(START, {A: 100, B: 120, C: 10**18})) == 100 + 120 + 240


def test_without_any_tokens_the_longer_chain_wins():
    short, _, _ = grown(START, 3, {A: 0, B: 0})
    long, _, _ = grown(START, 4, {A: 0})
    assert long.tokens == 0
    assert long.weight > short.weight


def test_a_chain_is_heavier_than_its_own_past_and_survives_json():
    _, heads, _ = grown(START, 8, {A: 7, B: 0})
    assert sorted(heads, key=lambda head: head.weight) == heads
    known = replace(heads[-1], anchor=digest_of("known"))
    assert Head.from_dict(known.to_dict()) == known


def test_a_locator_is_short_newest_first_and_reaches_the_oldest():
    history = History(START)
    heads = grown(START, 300, {A: 1})[1]
    for head in heads:
        history.add(head)
    places = history.locator()
    assert len(places) <= LOCATOR
    assert [round_ for round_, _ in places[:8]] == list(range(300, 292, -1))
    assert places[-1] == (0, START.hash)
    for head in grown(heads[-1], LENGTH, {A: 1})[1]:
        history.add(head)
    assert history.at((0, START.hash)) is None, "bounded"


def forked(common: int, ours: int, theirs: int):
    fork, heads, commits = grown(START, common, {A: 10, B: 10, C: 10})
    our_heads = grown(fork, ours, {A: 10})[1]
    claimed, their_heads, their_commits = grown(fork, theirs, {B: 10, C: 10})
    history = History(START)
    for head in (*heads, *our_heads):
        history.add(head)
    return history, fork, (heads, commits), (claimed, their_heads, their_commits)


def test_a_branch_is_followed_from_where_it_left_even_when_the_locator_named_an_older_place():
    history, fork, (_, commits), (claimed, their_heads, theirs) = forked(6, 3, 4)
    claimed = replace(claimed, anchor=digest_of("claimed"))
    branch = check_branch(history, START, [*commits, *theirs], claimed, RULES)
    assert branch.shared == fork
    assert branch.heads == tuple(their_heads)


def test_a_branch_of_forged_or_missing_records_or_with_a_false_claim_is_refused():
    history, fork, _, (claimed, _, theirs) = forked(2, 2, 3)
    forged = [signed(theirs[0].record, 0), *theirs[1:]]
    with pytest.raises(PayloadError, match="1 votes, a majority is 2 of 3"):
        check_branch(history, fork, forged, claimed, RULES)
    with pytest.raises(PayloadError, match="does not follow"):
        check_branch(history, fork, theirs[1:], claimed, RULES)
    with pytest.raises(PayloadError, match="does not lead to the head"):
        check_branch(history, fork, theirs, replace(claimed, tokens=10**18), RULES)


def test_one_member_alone_makes_no_commit_of_a_fragment_that_there_is_not():
    """It drops all others: its vote is a majority of those left. Who caught up with it ended of the fragment."""
    alone = signed(replace(record(START, {}, next_members=(A,)), fragment=2**32 - 1), names().index(A))
    with pytest.raises(PayloadError, match="not its turn"):
        RULES.next(START, alone)


def names() -> list[bytes]:
    return [signer_of(number).peer for number in range(3)]


@pytest.mark.parametrize("lists", ["frames", "contributors"])
def test_a_record_that_names_a_stranger_or_a_member_twice_follows_nothing(lists):
    """A flipped bit of a peer's id in the plan of a reduce was voted for by all who took the plan."""
    whole = record(START, {A: 1, B: 1})
    head = START.extended(whole)
    named = record(head, {A: 1, B: 1}).frames
    for wrong in (named[0], replace(named[0], part=1)), (named[0], replace(named[1], peer=bytes(32))):
        with pytest.raises(PayloadError, match=r"is no member|contributions of 1 peers"):
            head.extended(replace(record(head, {A: 1, B: 1}), **{lists: wrong}))


def test_a_reduce_names_several_results_of_one_owner_and_none_of_a_stranger():
    named = record(START, {A: 1, B: 1}).frames
    ranges = ((A, 0, 1), (A, 1, 2))
    results = (named[0], replace(named[0], part=1))
    reduced = replace(record(START, {A: 1, B: 1}), frames=results, contributors=named, partition=ranges)
    assert m.decode_record(m.encode_record(reduced)) == reduced
    assert START.extended(reduced).round == 1
    strange = replace(reduced, frames=(named[0], replace(named[0], part=1, peer=bytes([255] * 32))))
    with pytest.raises(PayloadError, match="is no member"):
        START.extended(strange)


def test_after_a_switch_only_places_of_the_new_branch_are_known():
    history, fork, _, (claimed, their_heads, _) = forked(2, 3, 4)
    history.switch(fork, [*their_heads[:-1], claimed])
    assert [round_ for round_, _ in history.locator()] == [6, 5, 4, 3, 2, 1, 0]
    assert history.newest_of([(claimed.round, claimed.hash), (0, START.hash)]) == claimed


def test_an_acceptor_of_a_branch_that_was_given_up_is_not_taken_up_again():
    fork, _, _ = grown(START, 2, {A: 1})
    one, other = (fork.extended(record(fork, {peer: 1})) for peer in (A, B))
    accepted = Acceptor(4, 1, 1, record(one, {A: 1}))
    assert accepted.continues(one.round, one.hash)
    assert not accepted.continues(other.round, other.hash)
    assert Acceptor(4, 3).continues(other.round, other.hash), "a promise names no record"


def test_the_way_to_a_head_is_found_among_commits_of_branches_that_were_given_up():
    fork, heads, shared = grown(START, 3, {A: 100, B: 100})
    _, _, given_up = grown(fork, 4, {B: 100})
    head, after, ours = grown(fork, 2, {A: 100, B: 100})
    past = retrace({heads[1].hash: heads[1]}, [*shared, *given_up, *ours], head)
    assert past.commits == (*shared, *ours)
    assert past.heads == (heads[1], heads[2], *after), "from the oldest place whose membership and weight are known"
    assert retrace({}, ours, head).heads == ()
    assert retrace({}, shared, head).commits == ()


# ---- test membership ----
#
# Who is in, who is out, and who decides alone when too many are gone.


def test_a_minority_does_not_commit_and_follows_the_majority_when_healed(make_swarm):
    swarm = make_swarm(5)
    minority = set(swarm.members[:2])
    swarm.lose = lambda a, b, message: (a in minority) != (b in minority)
    for peer in swarm.members:
        others = frozenset(p for p in swarm.members if (p in minority) != (peer in minority))
        swarm.machine(peer).liveness(others, frozenset(), swarm.now)
    swarm.run(lambda: swarm.offer_all() or all(swarm.rounds_done(p) >= 2 for p in swarm.members[2:]))
    assert all(swarm.rounds_done(peer) == 0 for peer in minority)
    swarm.lose = lambda a, b, message: False
    for peer in swarm.members:
        swarm.machine(peer).liveness(frozenset(), frozenset(), swarm.now)
    for peer in minority:
        swarm.machine(peer).state.round.offers.clear()
        swarm.do(peer, swarm.machine(peer).receive(swarm.members[-1], m.Behind(99), swarm.now))
    assert swarm.run(lambda: all(swarm.rounds_done(p) >= 2 for p in swarm.members))
    swarm.check_agreement()


def test_two_peers_and_one_dies_the_other_goes_on_once_it_is_given_up(make_swarm):
    swarm = make_swarm(2)
    assert finish_round(swarm, 2)
    victim = swarm.members[0]
    swarm.kill(victim)
    swarm.lose_leases(gone=False)
    assert not finish_round(swarm, 1, limit=30), "half of an epoch is no majority"
    swarm.lose_leases(gone=True)
    assert finish_round(swarm, 3)
    assert swarm.machine(swarm.members[1]).head.members == (swarm.members[1],)


@pytest.mark.parametrize("n", few_of(range(25), 10))
def test_the_survivor_of_two_goes_on_whatever_was_voted_when_the_other_died(make_swarm, n):
    swarm = make_swarm(2, seed=n)
    victim = swarm.leaders()[n % 2]
    swarm.on_delivery = lambda count: swarm.kill(victim) if count == n // 2 + 1 else None
    swarm.run(lambda: swarm.offer_all() or victim not in swarm.alive(), limit=20)
    swarm.kill(victim)
    swarm.lose_leases(gone=True)
    assert finish_round(swarm, 2)


def test_a_joiner_is_admitted_between_rounds_at_once(make_swarm):
    swarm = make_swarm(4)
    joiner = swarm.members[3]
    for host in swarm.hosts.values():
        host.machine.state.restart(replace(swarm.genesis(), members=swarm.members[:3]), swarm.now)
    request = join_request(swarm.signer(joiner), 0, swarm.genesis().hash)
    for peer in swarm.members[:3]:
        swarm.do(peer, swarm.machine(peer).receive(joiner, request, swarm.now))
    assert swarm.run(lambda: all(joiner in host.machine.head.members for host in swarm.hosts.values()), limit=10)
    assert swarm.machine(joiner).head.outer_step == 0
    assert finish_round(swarm, 2)
    assert joiner in swarm.named(joiner)


def test_more_newcomers_than_a_record_can_name_are_let_in_one_record_after_the_other(make_swarm):
    """A record of 1,027 members could not be written, and the leader ended: who wanted that needed 1,022 keys."""
    swarm = make_swarm(3)
    machine = swarm.machine(swarm.members[0])
    for number in range(m.MAX_PEERS + 100):
        newcomer = signer_of(1000 + number)
        machine.receive(newcomer.peer, join_request(newcomer, 0, bytes(32)), swarm.now)
    wanted = next_members(machine.state, swarm.now)
    assert len(wanted) == m.MAX_PEERS
    assert set(swarm.members) <= set(wanted)
    assert len(machine.state.joiners) <= m.MAX_PEERS


def test_goodbye_takes_a_peer_out_with_the_next_record(make_swarm):
    swarm = make_swarm(3)
    leaver = swarm.members[1]
    swarm.leave(leaver)
    swarm.kill(leaver)
    assert finish_round(swarm, 2)
    assert leaver not in swarm.head.members


def test_below_min_peers_nothing_is_committed(make_swarm):
    swarm = make_swarm(2, min_peers=3)
    assert not finish_round(swarm, 1, limit=60)


def test_a_shrink_is_remembered_until_those_given_up_are_back_and_a_goodbye_is_none(make_swarm):
    swarm = make_swarm(4)
    assert finish_round(swarm, 1)
    leaver, dead, one, other = swarm.members
    swarm.leave(leaver)
    swarm.kill(leaver)
    swarm.kill(dead)
    swarm.lose_leases(gone=True)
    assert finish_round(swarm, 2)
    machines = [swarm.machine(peer) for peer in (one, other)]
    assert [machine.state.given_up for machine in machines] == [{dead}, {dead}]
    for machine in machines:
        machine.liveness(frozenset(), frozenset(), swarm.now)
        machine.state.presence.unreachable.clear()
        machine.state.joiners[dead] = join_request(swarm.signer(dead), 0, machine.head.hash)
    assert swarm.run(lambda: all(dead in machine.head.members for machine in machines), limit=30)
    assert not any(machine.state.given_up for machine in machines)


def test_a_peer_that_comes_back_after_its_goodbye_stays_a_member(make_swarm):
    swarm = make_swarm(3)
    moody, *others = swarm.members
    swarm.offer(others[0])
    swarm.run(lambda: not swarm.queue)
    swarm.leave(moody)
    swarm.come_back(moody)
    swarm.offer(moody)
    swarm.run(lambda: not swarm.queue)
    assert finish_round(swarm, 2)
    assert swarm.machine(others[0]).head.epoch == 0


def test_an_accepted_record_that_drops_a_peer_who_is_back_does_not_end_the_run(make_swarm):
    """Two of four left it, so the two others would have voted on it; only one did before the third came back."""
    swarm = make_swarm(4)
    leader, dead, back, other = swarm.leaders()
    for peer in (leader, other):
        swarm.offer(peer)
    swarm.run(lambda: not swarm.queue)
    swarm.kill(dead)
    swarm.lose = lambda sender, to, message: sender == back or isinstance(message, m.Proposal)
    swarm.leave(back, to=[leader])
    swarm.lose_leases(gone=True)
    assert swarm.run(lambda: swarm.machine(leader).state.acceptor.accepted is not None)
    dropped = set(swarm.members) - set(swarm.machine(leader).state.acceptor.accepted.next_members)
    assert dropped == {dead, back}
    swarm.lose = lambda sender, to, message: False
    swarm.come_back(back)
    swarm.asks_again = True
    assert finish_round(swarm, 2)
    assert back in swarm.machine(leader).head.members
    swarm.check_agreement()


def test_strangers_can_make_a_peer_keep_only_so_much_of_rounds_to_come(make_swarm):
    """A thousand identities cost nothing; a member's word is kept beside theirs."""
    swarm = make_swarm(3)
    machine, member = swarm.machine(swarm.members[0]), swarm.members[1]
    for number in range(1000):
        machine.receive(signer_of(1000 + number).peer, m.Prepare(0, 5, 1), 0.0)
    machine.receive(member, m.Prepare(0, 5, 1), 0.0)
    kept = {peer for peer, _ in machine.state.early}
    assert member in kept
    assert len(kept) <= 33


def test_a_member_that_is_ahead_is_caught_up_with_whatever_strangers_said_before_it(make_swarm):
    """Whom the last effect names is asked: a stranger's word is not acted upon, and must not hide a member's."""
    swarm = make_swarm(3)
    machine, member = swarm.machine(swarm.members[0]), swarm.members[1]
    for number in range(3):
        machine.receive(signer_of(1000 + number).peer, m.Prepare(0, 5, 1), 0.0)
    machine.receive(member, m.Prepare(0, 5, 1), 0.0)
    machine.receive(signer_of(2000).peer, m.Prepare(0, 5, 1), 0.0)
    asked = [effect.peer for effect in machine.tick(FETCH_AFTER + 0.1) if isinstance(effect, CatchUpWith)]
    assert asked[-1] == member
    assert len(asked) == len(set(asked)) == 5, "one of the strangers may have been let in by those who are ahead"


def test_a_record_of_few_that_cannot_be_voted_on_any_more_stalls_nobody_whom_it_dropped_and_who_is_back(make_swarm):
    swarm = make_swarm(4)
    first, *back, other = swarm.leaders()
    for peer in back:
        swarm.kill(peer)
    swarm.lose = lambda sender, to, message: True
    swarm.lose_leases(gone=True)
    record = swarm.machine(first).state.acceptor.accepted
    assert set(record.next_members) == {first, other}, "the two who are left go on without the others"
    swarm.run(lambda: not swarm.queue)
    swarm.kill(other)
    for peer in back:
        swarm.restart(peer)
    swarm.lose = lambda sender, to, message: False
    swarm.lose_leases(gone=True)
    assert finish_round(swarm, 2, limit=60.0), "who voted on it is gone, and who is here is dropped by it"
    swarm.check_agreement()
