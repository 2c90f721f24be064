from __future__ import annotations

from dataclasses import replace

import pytest

from decentral.errors import PayloadError
from decentral.rounds import chain
from decentral.rounds.effects import Decide
from decentral.wire import messages as m
from decentral.wire.frames import Kind
from tests.rounds.conftest import digest_of


def finish_round(swarm, count: int = 1, limit: float = 200.0) -> bool:
    """Let every living member offer until each has ``count`` more outer steps."""
    goal = {peer: swarm.rounds_done(peer) + count for peer in swarm.alive()}

    def done() -> bool:
        behind = [peer for peer in swarm.alive() if swarm.rounds_done(peer) < goal[peer]]
        for peer in behind:
            swarm.offer(peer)
        return not behind

    return swarm.run(done, limit)


@pytest.mark.parametrize("reduce", [False, True], ids=["gather", "reduce"])
@pytest.mark.parametrize("num_peers", [1, 2, 3, 4, 7])
def test_all_offers_are_named_and_all_peers_commit_the_same_record(make_swarm, num_peers, reduce):
    swarm = make_swarm(num_peers, reduce=reduce)
    assert finish_round(swarm, 5)
    swarm.check_agreement()
    assert sorted(swarm.named(swarm.members[0])) == sorted(swarm.members)


def test_each_round_is_led_by_the_peer_that_the_hash_chooses(make_swarm):
    swarm = make_swarm(4)
    leaders = set()
    for _ in range(30):
        leaders.add(chain.leaders(swarm.hosts[swarm.members[0]].machine.head)[0])
        assert finish_round(swarm)
    assert leaders == set(swarm.members)


@pytest.mark.parametrize("reduce", [False, True], ids=["gather", "reduce"])
@pytest.mark.parametrize("who", ["leader", "contributor"])
def test_a_kill_before_any_delivery_leaves_the_survivors_agreed_and_going(make_swarm, who, reduce):
    """Every message of a round is a phase: the victim dies right before the n-th delivery, for every n."""
    n, last = 0, 1
    while n < last:
        swarm = make_swarm(4, reduce=reduce, seed=n)
        order = chain.leaders(swarm.hosts[swarm.members[0]].machine.head)
        victim = order[0] if who == "leader" else order[-1]
        swarm.on_delivery = lambda count, n=n, swarm=swarm, victim=victim: (
            swarm.kill(victim) if count == n + 1 else None
        )
        assert finish_round(swarm), f"hang after a kill before delivery {n}"
        last = max(last, swarm.delivered)
        if victim in swarm.alive():
            break
        swarm.lose_leases(gone=False)
        assert finish_round(swarm, 3), f"no further round after a kill before delivery {n}"
        swarm.check_agreement()
        assert victim not in swarm.hosts[swarm.alive()[0]].machine.head.members
        n += 1
    assert n > 10, "the enumeration ended before it covered a round"


@pytest.mark.parametrize("who", ["leader", "contributor"])
def test_a_peer_restarted_from_its_disk_never_votes_twice_and_comes_back_into_step(make_swarm, who):
    for n in range(40):
        swarm = make_swarm(3, seed=n)
        order = chain.leaders(swarm.hosts[swarm.members[0]].machine.head)
        victim = order[0] if who == "leader" else order[-1]

        def crash(count: int, n: int = n, swarm=swarm, victim=victim) -> None:
            if count == n + 1:
                swarm.kill(victim)
            elif count == n + 4:
                swarm.restart(victim)

        swarm.on_delivery = crash
        assert finish_round(swarm, 3), f"hang after a restart at delivery {n}"
        swarm.check_agreement()


def after_a_lost_tail(swarm) -> bytes:
    """Two of three commit two rounds; then one is away and the other, returned here, forgets both, but not its vote."""
    assert finish_round(swarm)
    kept, cut, late = swarm.members
    swarm.lose = lambda sender, to, message: late in (sender, to)
    while min(swarm.rounds_done(kept), swarm.rounds_done(cut)) < 3:
        swarm.offer_all()
        assert swarm.run(lambda: not swarm.queue)
        swarm.run(lambda: False, 1.0)
    swarm.lose = lambda sender, to, message: kept in (sender, to)
    swarm.hosts[cut].disk.log = swarm.hosts[cut].disk.log[:1]
    swarm.restart(cut)
    return cut


def commits(swarm, peer: bytes) -> bool:
    """Whether ``peer`` gets anywhere within a minute."""
    before = swarm.rounds_done(peer)

    def moved() -> bool:
        swarm.offer_all()
        return swarm.rounds_done(peer) > before

    return swarm.run(moved, 60.0)


def test_a_peer_that_lost_its_last_commits_does_not_vote_in_their_rounds_again(make_swarm):
    swarm = make_swarm(3)
    cut = after_a_lost_tail(swarm)
    assert not commits(swarm, cut), "two of three know nothing of rounds that were committed"
    swarm.lose = lambda sender, to, message: False
    assert finish_round(swarm, 3)
    swarm.check_agreement()
    assert not swarm.hosts[cut].machine.forgetful


def test_what_everybody_forgot_can_be_committed_anew(make_swarm):
    swarm = make_swarm(3)
    cut = after_a_lost_tail(swarm)
    swarm.hosts[cut].machine.forget()
    assert commits(swarm, cut)


@pytest.mark.parametrize("loss", [0.1, 0.3])
@pytest.mark.parametrize("seed", range(15))
def test_lost_messages_cost_time_and_nothing_else(make_swarm, seed, loss):
    swarm = make_swarm(4, seed=seed)
    swarm.lose = lambda a, b, message: swarm.random.random() < loss
    assert finish_round(swarm, 4, limit=2000)
    swarm.check_agreement()


def test_every_message_delivered_twice_changes_nothing(make_swarm):
    swarm = make_swarm(4, seed=3)
    original = swarm.deliver_one

    def twice() -> None:
        if swarm.queue and swarm.random.random() < 0.5:
            swarm.queue.append(swarm.random.choice(swarm.queue))
        original()

    swarm.deliver_one = twice
    assert finish_round(swarm, 5)
    swarm.check_agreement()


def test_a_minority_does_not_commit_and_follows_the_majority_when_healed(make_swarm):
    swarm = make_swarm(5)
    minority = set(swarm.members[:2])
    swarm.lose = lambda a, b, message: (a in minority) != (b in minority)
    for peer in swarm.members:
        others = frozenset(p for p in swarm.members if (p in minority) != (peer in minority))
        swarm.hosts[peer].machine.liveness(others, frozenset(), swarm.now)
    swarm.run(lambda: swarm.offer_all() or all(swarm.rounds_done(p) >= 2 for p in swarm.members[2:]))
    assert all(swarm.rounds_done(peer) == 0 for peer in minority)
    swarm.lose = lambda a, b, message: False
    for peer in swarm.members:
        swarm.hosts[peer].machine.liveness(frozenset(), frozenset(), swarm.now)
    for peer in minority:
        swarm.hosts[peer].machine.round.offers.clear()
        swarm._do(peer, swarm.hosts[peer].machine.receive(swarm.members[-1], m.Behind(99), swarm.now))
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
    assert swarm.hosts[swarm.members[1]].machine.head.members == (swarm.members[1],)


@pytest.mark.parametrize("n", range(25))
def test_the_survivor_of_two_goes_on_whatever_was_voted_when_the_other_died(make_swarm, n):
    swarm = make_swarm(2, seed=n)
    victim = chain.leaders(swarm.hosts[swarm.members[0]].machine.head)[n % 2]
    swarm.on_delivery = lambda count: swarm.kill(victim) if count == n // 2 + 1 else None
    swarm.run(lambda: swarm.offer_all() or victim not in swarm.alive(), limit=20)
    swarm.kill(victim)
    swarm.lose_leases(gone=True)
    assert finish_round(swarm, 2)


def test_a_late_peer_is_passed_by_after_the_deadline_and_named_again_when_it_is_back(make_swarm):
    swarm = make_swarm(4)
    assert finish_round(swarm, 3)
    late = swarm.members[2]
    others = [peer for peer in swarm.members if peer != late]
    swarm.run(lambda: not swarm.queue)  # the round that it has offered for already may end
    goal = swarm.rounds_done(late) + 1 + (late in swarm.hosts[late].machine.round.offers)
    swarm.run(lambda: [swarm.offer(p) for p in others] and all(swarm.rounds_done(p) >= goal for p in others))
    assert swarm.named(others[0]) == sorted(others)
    assert finish_round(swarm, 2)
    assert late in swarm.named(others[0])


def test_a_joiner_is_admitted_between_rounds_at_once(make_swarm):
    swarm = make_swarm(4)
    joiner = swarm.members[3]
    for host in swarm.hosts.values():
        host.machine.restart(
            chain.Head(*_genesis_fields(swarm), tuple(p for p in swarm.members if p != joiner)), swarm.now
        )
    request = m.JoinRequest(0, swarm.genesis().hash)
    for peer in swarm.members[:3]:
        swarm._do(peer, swarm.hosts[peer].machine.receive(joiner, request, swarm.now))
    assert swarm.run(lambda: all(joiner in host.machine.head.members for host in swarm.hosts.values()), limit=10)
    assert swarm.hosts[joiner].machine.head.outer_step == 0
    assert finish_round(swarm, 2)
    assert joiner in swarm.named(joiner)


def _genesis_fields(swarm):
    head = swarm.genesis()
    return head.run, head.epoch, head.round, head.outer_step, head.hash, head.anchor


def test_goodbye_takes_a_peer_out_with_the_next_record(make_swarm):
    swarm = make_swarm(3)
    leaver = swarm.members[1]
    swarm.leave(leaver)
    swarm.kill(leaver)
    assert finish_round(swarm, 2)
    assert leaver not in swarm.hosts[swarm.members[0]].machine.head.members


def test_below_min_peers_nothing_is_committed(make_swarm):
    swarm = make_swarm(2, min_peers=3)
    assert not finish_round(swarm, 1, limit=60)


def test_the_last_round_says_so_and_nothing_follows_it(make_swarm):
    swarm = make_swarm(3, rounds=2)
    assert finish_round(swarm, 2)
    assert all(host.machine.head.final for host in swarm.hosts.values())
    assert not finish_round(swarm, 1, limit=30)


def test_time_is_up_ends_the_run_with_the_next_commit(make_swarm):
    swarm = make_swarm(3)
    for host in swarm.hosts.values():
        host.machine.time_is_up = True
    assert finish_round(swarm, 1)
    assert swarm.hosts[swarm.members[0]].machine.head.final


def test_a_vote_with_anothers_signature_is_refused(make_swarm):
    swarm = make_swarm(3)
    leader = chain.leaders(swarm.genesis())[0]
    a, b = (peer for peer in swarm.members if peer != leader)
    swarm.offer_all()
    machine = swarm.hosts[leader].machine
    swarm.run(lambda: machine.leading is not None and machine.leading.proposal is not None)
    record = machine.leading.proposal.record
    signer = next(s for s in swarm.signers if s.peer == a)
    text = m.vote_text(record.run, record.epoch, record.round, 0, record.hash)
    with pytest.raises(PayloadError, match="not signed by its sender"):
        machine.receive(b, m.Vote(record.epoch, record.round, 0, record.hash, signer.sign(text)), swarm.now)


def test_a_commit_without_a_majority_of_signatures_is_refused(make_swarm):
    swarm = make_swarm(4)
    assert finish_round(swarm, 1)
    commit = swarm.hosts[swarm.members[0]].disk.log[0]
    thin = m.Commit(commit.record, m.Certificate(commit.certificate.ballot, commit.certificate.votes[:2]))
    fresh = make_swarm(4).hosts[swarm.members[0]].machine
    with pytest.raises(PayloadError):
        fresh.receive(swarm.members[1], thin, 0.0)
    assert fresh.decided is None


def test_a_record_on_another_branch_asks_for_the_chain_instead_of_being_applied(make_swarm):
    swarm = make_swarm(3)
    assert finish_round(swarm, 1)
    peer, other = swarm.members[0], swarm.members[1]
    head = swarm.hosts[peer].machine.head
    swarm.hosts[peer].machine.restart(
        chain.Head(head.run, head.epoch, head.round, head.outer_step, bytes(32), head.anchor, head.members),
        swarm.now,
    )
    swarm.hosts[peer].disk.log.clear()
    finish = swarm.rounds_done(other) + 1
    swarm.run(lambda: [swarm.offer(p) for p in swarm.members[1:]] and swarm.rounds_done(other) >= finish, limit=60)
    swarm.run(lambda: bool(swarm.hosts[peer].caught_up_with), limit=20)
    assert swarm.hosts[peer].caught_up_with
    assert swarm.hosts[peer].disk.log == []


@pytest.mark.parametrize("seed", range(5))
def test_every_member_is_sent_a_commit_once_though_votes_come_after_the_majority(make_swarm, seed):
    swarm = make_swarm(9, seed=seed)
    sent = []
    swarm.lose = lambda sender, to, message: sent.append((to, message)) or False
    assert finish_round(swarm, 4)
    swarm.run(lambda: not swarm.queue)
    commits = [(to, message.record.round) for to, message in sent if isinstance(message, m.Commit)]
    assert len(commits) == len(set(commits)) == 8 * swarm.rounds_done(swarm.members[0])


def test_a_peer_whose_commit_was_lost_gets_it_once_it_has_waited(make_swarm):
    swarm = make_swarm(3)
    victim = chain.leaders(swarm.hosts[swarm.members[0]].machine.head)[-1]
    lost = []
    swarm.lose = lambda sender, to, message: (
        isinstance(message, m.Commit) and to == victim and not lost and not lost.append(message)
    )
    swarm.offer_all()
    assert swarm.run(lambda: all(swarm.rounds_done(peer) == 1 for peer in swarm.members), limit=20.0)
    assert lost


@pytest.mark.parametrize("lie", ["anothers frame", "more tokens"])
def test_an_offer_that_does_not_describe_its_frame_is_left_out_and_stalls_nobody(make_swarm, lie):
    swarm = make_swarm(4)
    assert finish_round(swarm, 2)
    liar, victim = swarm.members[1], swarm.members[2]
    for peer in swarm.members:
        if peer != liar:
            swarm.offer(peer)
    honest = swarm.hosts[victim].machine.round.offers[victim]
    false = honest if lie == "anothers frame" else replace(honest, frame=digest_of("own"), tokens=10**18)
    header = swarm._header(Kind.CONTRIBUTION, liar, swarm.hosts[liar].machine.head)
    for peer in swarm.members:
        machine = swarm.hosts[peer].machine
        if lie == "more tokens":
            swarm.hosts[peer].frames[false.frame] = header
            swarm._do(peer, machine.hold(false.frame, header, swarm.now))
        swarm._do(peer, machine.receive(liar, false, swarm.now))
    goal = swarm.rounds_done(victim) + 1
    assert swarm.run(lambda: all(swarm.rounds_done(peer) >= goal for peer in swarm.members), limit=30)
    assert swarm.named(victim) == [peer for peer in swarm.members if peer != liar]


def test_a_full_contribution_presses_those_who_have_not_offered_and_a_short_one_nobody(make_swarm):
    swarm = make_swarm(3)
    slow, others = swarm.members[0], swarm.members[1:]
    machine = swarm.hosts[slow].machine
    assert machine.time_left(swarm.now) is None, "nobody has offered yet"
    for peer in others:
        swarm.offer(peer)
    swarm.run(lambda: len(machine.round.offers) == 2)
    first, opened = machine.round.first_offer, machine.round.opened
    left = machine.time_left(first)
    assert 0 < left < machine.deadline.at(opened, first) - first
    assert machine.time_left(first + 100) < 0
    machine.terms = replace(machine.terms, steps=6)
    assert machine.time_left(first) is None
    machine.terms = replace(machine.terms, steps=5)
    assert swarm.hosts[others[0]].machine.time_left(first) is None, "it has offered"


def test_the_deadline_learns_from_full_contributions_once_their_frames_are_here(make_swarm):
    swarm = make_swarm(2)
    a, b = swarm.members
    machine = swarm.hosts[a].machine
    machine.terms = replace(machine.terms, steps=5)
    head = machine.head
    frame, header = digest_of("late frame"), swarm._header(Kind.CONTRIBUTION, b, head)
    offer = m.Offer(head.epoch, 1, 0, head.anchor, frame, 100, 5, 50)
    machine.receive(b, offer, 2.0)
    assert not machine.deadline._delays
    machine.hold(frame, header, 7.0)
    assert list(machine.deadline._delays) == [7.0]
    machine.terms = replace(machine.terms, steps=6)
    swarm.offer(a)
    assert list(machine.deadline._delays) == [7.0], "fewer steps than a full contribution"


def test_a_shrink_is_remembered_until_those_given_up_are_back_and_a_goodbye_is_none(make_swarm):
    swarm = make_swarm(4)
    assert finish_round(swarm, 1)
    leaver, dead, one, other = swarm.members
    swarm.leave(leaver)
    swarm.kill(leaver)
    swarm.kill(dead)
    swarm.lose_leases(gone=True)
    assert finish_round(swarm, 2)
    machines = [swarm.hosts[peer].machine for peer in (one, other)]
    assert [machine.given_up for machine in machines] == [{dead}, {dead}]
    for machine in machines:
        machine.liveness(frozenset(), frozenset(), swarm.now)
        machine.presence.unreachable.clear()
        machine.joiners[dead] = m.JoinRequest(0, machine.head.hash)
    assert swarm.run(lambda: all(dead in machine.head.members for machine in machines), limit=30)
    assert not any(machine.given_up for machine in machines)


def test_a_voter_that_restarts_still_has_the_frames_it_voted_for_when_their_owner_is_dead(make_swarm):
    swarm = make_swarm(3)
    leader, owner, third = chain.leaders(swarm.genesis())
    swarm.lose = lambda a, b, message: b == third and (isinstance(message, tuple | m.Proposal) or a == owner)
    swarm.offer(leader)
    swarm.offer(owner)
    voter = swarm.hosts[leader]
    assert swarm.run(lambda: voter.machine.acceptor.accepted is not None, limit=30)
    assert [ref.peer for ref in voter.machine.acceptor.accepted.frames] == sorted([leader, owner])
    swarm.queue.clear()
    swarm.kill(owner)
    swarm.restart(leader)
    swarm.lose = lambda a, b, message: False
    swarm.lose_leases(gone=False)
    assert finish_round(swarm, 2), "bound to a record whose frames nobody has"
    swarm.check_agreement()


def test_who_missed_the_plan_of_a_reduce_learns_from_the_record_how_large_its_results_are(make_swarm):
    swarm = make_swarm(3, reduce=True)
    victim = chain.leaders(swarm.genesis())[-1]
    swarm.lose = lambda a, b, message: b == victim and isinstance(message, m.Plan | tuple)
    asked = []
    fetch = swarm._fetch
    swarm._fetch = lambda peer, effect: asked.append((peer, effect.record)) or fetch(peer, effect)
    swarm.offer_all()
    swarm.run(lambda: any(peer == victim for peer, _ in asked), limit=30.0)
    assert {record.partition != () for peer, record in asked if peer == victim} == {True}


def test_nothing_more_is_decided_before_what_was_decided_is_applied(make_swarm):
    swarm = make_swarm(3)
    me, other, third = swarm.members
    machine = swarm.hosts[me].machine
    lists = {"members": swarm.members, "frames": (), "contributors": (), "partition": (), "next_members": (me, other)}
    numbers = {"epoch": 0, "round": 1, "outer_step": 0, "fragment": 0, "plan": 0}
    head = machine.head
    record = m.Record(**numbers, **lists, run=head.run, previous=head.hash, base=head.anchor, final=False)
    text = m.vote_text(record.run, 0, 1, 0, record.hash)
    votes = tuple((s.peer, s.sign(text)) for s in swarm.signers if s.peer in (me, other))
    machine.presence.leaving |= {other, third}  # so that it is alone, and could decide on the next one at once
    effects = machine.receive(other, m.Commit(record, m.Certificate(0, votes)), 0.0)
    assert [e.commit.record.round for e in effects if isinstance(e, Decide)] == [1]
    effects = machine.applied(head.anchor, 0.0)
    assert [e.commit.record.round for e in effects if isinstance(e, Decide)] == [2]


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
    assert swarm.hosts[others[0]].machine.head.epoch == 0


def test_a_round_that_restarts_at_a_high_ballot_does_not_wait_for_all_the_ballots_before_it(make_swarm):
    swarm = make_swarm(3)
    for host, signer in zip(list(swarm.hosts.values()), swarm.signers, strict=True):
        host.disk.acceptor = host.machine.acceptor.promise(9).to_bytes()
        swarm.start(signer, host.disk)
    swarm.lose = lambda sender, to, message: isinstance(message, m.Proposal) and message.ballot == 9
    assert finish_round(swarm, 1, limit=20.0)


def test_an_accepted_record_that_drops_a_peer_who_is_back_does_not_end_the_run(make_swarm):
    """Two of four left it, so the two others would have voted on it; only one did before the third came back."""
    swarm = make_swarm(4)
    leader, dead, back, other = chain.leaders(swarm.hosts[swarm.members[0]].machine.head)
    for peer in (leader, other):
        swarm.offer(peer)
    swarm.run(lambda: not swarm.queue)
    swarm.kill(dead)
    swarm.lose = lambda sender, to, message: sender == back
    swarm.leave(back, to=[leader])
    swarm.lose_leases(gone=True)
    assert swarm.run(lambda: swarm.hosts[leader].machine.acceptor.accepted is not None)
    dropped = set(swarm.members) - set(swarm.hosts[leader].machine.acceptor.accepted.next_members)
    assert dropped == {dead, back}
    swarm.lose = lambda sender, to, message: False
    swarm.come_back(back)
    assert finish_round(swarm, 2)
    assert back in swarm.hosts[leader].machine.head.members
    swarm.check_agreement()


@pytest.mark.parametrize("stalled_for", [5.0, 13.0, 30.0, 60.0, 130.0])
def test_peers_that_restarted_at_different_ballots_agree_on_who_leads(make_swarm, stalled_for):
    """Each took the other's ballot for the one in charge for two minutes, and neither led."""
    swarm = make_swarm(4)
    order = chain.leaders(swarm.hosts[swarm.members[0]].machine.head)
    for peer, ballot in ((order[0], 67), (order[2], 65)):
        swarm.hosts[peer].disk.acceptor = swarm.hosts[peer].machine.acceptor.promise(ballot).to_bytes()
        swarm.restart(peer)
    for peer in (order[1], order[3]):
        swarm.kill(peer)
    swarm.lose_leases(gone=True)
    swarm.lose = lambda sender, to, message: isinstance(message, m.Proposal | m.Vote)
    assert not finish_round(swarm, limit=stalled_for)
    swarm.lose = lambda sender, to, message: False
    assert finish_round(swarm, limit=20.0)
    swarm.check_agreement()


def test_a_ballot_with_a_flipped_bit_is_refused(make_swarm):
    swarm = make_swarm(3)
    machine = swarm.hosts[swarm.members[0]].machine
    ballot = next(n for n in range(1 << 29, (1 << 29) + 3) if machine.leader_of(n) == swarm.members[1])
    with pytest.raises(PayloadError, match="far above"):
        machine.receive(swarm.members[1], m.Prepare(0, 1, ballot), 0.0)
    head = machine.head
    plan = m.Plan(0, 1, 0, 1 << 16, (m.FrameRef(swarm.members[0], digest_of("f"), 0, 1, 1),), ())
    sender = machine.leader_of(0) if machine.leader_of(0) != machine.me else swarm.members[1]
    with pytest.raises(PayloadError, match="none of ballot"):
        machine.receive(sender, plan, 0.0)
    assert (machine.acceptor.promised, machine.head) == (0, head)


@pytest.mark.parametrize("reduce", [False, True], ids=["gather", "reduce"])
@pytest.mark.parametrize("seed", range(20))
def test_messages_that_come_late_decide_nothing_twice(make_swarm, seed, reduce):
    """Up to twelve seconds late, with ballots of two: proposals meet acceptors that promised others long ago."""
    swarm = make_swarm(3 + seed % 3, seed=seed, reduce=reduce)
    late: list[tuple[float, tuple]] = []

    def delay(sender, to, message) -> bool:
        if swarm.random.random() < 0.7:
            return False
        late.append((swarm.now + swarm.random.uniform(0.0, 12.0), (sender, to, message)))
        return True

    def arrive() -> bool:
        swarm.queue += [parcel for due, parcel in late if due <= swarm.now]
        late[:] = [(due, parcel) for due, parcel in late if due > swarm.now]
        for peer in swarm.members:
            if swarm.random.random() < 0.05:  # not at once: what a leader finds depends on when it looks
                swarm.offer(peer)
        return min(map(swarm.rounds_done, swarm.members)) >= 25

    swarm.lose = delay
    assert swarm.run(arrive, limit=5000.0)
    swarm.check_agreement()


def test_who_promised_a_ballot_accepts_nothing_of_a_lower_one(make_swarm):
    swarm = make_swarm(3)
    first, second, voter = chain.leaders(swarm.hosts[swarm.members[0]].machine.head)
    swarm.offer_all()
    swarm.run(lambda: swarm.hosts[first].machine.proposal is not None)
    machine, (_, proposal) = swarm.hosts[voter].machine, swarm.hosts[first].machine.proposal
    for frame, header in swarm.hosts[first].machine.held.items():
        machine.hold(frame, header, swarm.now)
    assert machine.acceptor.accepted is None
    machine.receive(second, m.Prepare(0, 1, 1), swarm.now)
    effects = machine.receive(first, proposal, swarm.now)
    assert not [effect for effect in effects if isinstance(getattr(effect, "message", None), m.Vote)]
    assert (machine.acceptor.promised, machine.acceptor.accepted) == (1, None)
