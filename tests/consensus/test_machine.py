"""The course of a round: offers, kills, losses, late and repeated messages."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import pairwise

import pytest

from decentral.consensus.paxos import Acceptor, farewell
from decentral.consensus.round_state import Decide
from decentral.consensus.timing import FIRST_REST, LONGEST_REST, SLACK, Unsent
from decentral.errors import PayloadError
from decentral.wire import messages as m
from decentral.wire.frames import FrameKind
from tests.kit.machines import digest_of, few_of, finish_round


@pytest.mark.parametrize("reduce", [False, True], ids=["gather", "reduce"])
@pytest.mark.parametrize("num_peers", [1, 2, 3, 7])
def test_all_offers_are_named_and_all_peers_commit_the_same_record(make_swarm, num_peers, reduce):
    swarm = make_swarm(num_peers, reduce=reduce)
    assert finish_round(swarm, 5)
    swarm.check_agreement()
    assert sorted(swarm.named(swarm.members[0])) == sorted(swarm.members)


@pytest.mark.parametrize("reduce", [False, True], ids=["gather", "reduce"])
@pytest.mark.parametrize("who", ["leader", "contributor"])
def test_a_kill_before_any_delivery_leaves_the_survivors_agreed_and_going(make_swarm, who, reduce):
    """Every message of a round is a phase: the victim dies right before the n-th delivery, for every n."""
    n, last = 0, 1
    while n < last:
        swarm = make_swarm(4, reduce=reduce, seed=n)
        order = swarm.leaders()
        victim = order[0] if who == "leader" else order[-1]
        swarm.at_delivery({n + 1: functools.partial(swarm.kill, victim)})
        assert finish_round(swarm), f"hang after a kill before delivery {n}"
        last = max(last, swarm.delivered)
        if victim in swarm.alive():
            break
        swarm.lose_leases(gone=False)
        assert finish_round(swarm, 3), f"no further round after a kill before delivery {n}"
        swarm.check_agreement()
        assert victim not in swarm.machine(swarm.alive()[0]).head.members
        n += 1
    assert n > 10, "the enumeration ended before it covered a round"


@pytest.mark.parametrize("loss", [0.1, 0.3])
@pytest.mark.parametrize("seed", few_of(range(15), 4))
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


def test_the_last_round_says_so_and_nothing_follows_it(make_swarm):
    swarm = make_swarm(3, rounds=2)
    assert finish_round(swarm, 2)
    assert all(host.machine.head.final for host in swarm.hosts.values())
    assert not finish_round(swarm, 1, limit=30)


def test_time_is_up_ends_the_run_with_the_next_commit(make_swarm):
    swarm = make_swarm(3)
    swarm.terms.clock.is_up = True
    assert finish_round(swarm, 1)
    assert swarm.head.final


def test_a_record_on_another_branch_asks_for_the_chain_instead_of_being_applied(make_swarm):
    swarm = make_swarm(3)
    assert finish_round(swarm, 1)
    peer, other = swarm.members[0], swarm.members[1]
    swarm.machine(peer).state.restart(replace(swarm.machine(peer).head, hash=bytes(32)), swarm.now)
    swarm.hosts[peer].disk.log.clear()
    finish = swarm.rounds_done(other) + 1
    swarm.run(lambda: [swarm.offer(p) for p in swarm.members[1:]] and swarm.rounds_done(other) >= finish, limit=60)
    swarm.run(lambda: bool(swarm.hosts[peer].caught_up_with), limit=20)
    assert swarm.hosts[peer].caught_up_with
    assert swarm.hosts[peer].disk.log == []


@pytest.mark.parametrize("seed", range(3))
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
    victim = swarm.leaders()[-1]
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
    honest = swarm.machine(victim).state.round.offers[victim]
    false = honest if lie == "anothers frame" else replace(honest, frame=digest_of("own"), tokens=10**18)
    header = swarm.header(FrameKind.CONTRIBUTION, liar, swarm.machine(liar).head)
    for peer in swarm.members:
        machine = swarm.machine(peer)
        if lie == "more tokens":
            swarm.hosts[peer].frames[false.frame] = header
            swarm.do(peer, machine.hold(false.frame, header, swarm.now))
        swarm.do(peer, machine.receive(liar, false, swarm.now))
    goal = swarm.rounds_done(victim) + 1
    assert swarm.run(lambda: all(swarm.rounds_done(peer) >= goal for peer in swarm.members), limit=30)
    assert swarm.named(victim) == [peer for peer in swarm.members if peer != liar]


def test_who_missed_the_plan_of_a_reduce_learns_from_the_record_how_large_its_results_are(make_swarm):
    swarm = make_swarm(3, reduce=True)
    victim = swarm.leaders()[-1]
    swarm.lose = lambda a, b, message: b == victim and isinstance(message, m.ReducePlan | tuple)
    asked = []
    fetch = swarm.fetch
    swarm.fetch = lambda peer, effect: asked.append((peer, effect.record)) or fetch(peer, effect)
    swarm.offer_all()
    swarm.run(lambda: any(peer == victim for peer, _ in asked), limit=30.0)
    assert {record.partition != () for peer, record in asked if peer == victim} == {True}


def test_nothing_more_is_decided_before_what_was_decided_is_applied(make_swarm):
    swarm = make_swarm(3)
    me, other, third = swarm.members
    machine = swarm.machine(me)
    lists = {"members": swarm.members, "frames": (), "contributors": (), "partition": (), "next_members": (me, other)}
    numbers = {"epoch": 0, "round": 1, "outer_step": 0, "fragment": 0, "plan": 0}
    head = machine.head
    record = m.Record(**numbers, **lists, run=head.run, previous=head.hash, base=head.anchor, final=False)
    text = m.vote_text(record.run, 0, 1, 0, record.hash)
    votes = tuple((s.peer, s.sign(text)) for s in swarm.signers if s.peer in (me, other))
    said = farewell(Acceptor(2), head.run, 0, swarm.signer(other))
    machine.receive(other, said, 0.0)  # after its vote: so that it is alone then,
    machine.state.presence.leaving.add(third)  # and could decide on the next one at once
    effects = machine.receive(other, m.Commit(record, m.Certificate(0, votes)), 0.0)
    assert [e.commit.record.round for e in effects if isinstance(e, Decide)] == [1]
    effects = machine.note_applied(head.anchor, 0.0)
    assert [e.commit.record.round for e in effects if isinstance(e, Decide)] == [2]


def test_a_commit_is_known_since_it_was_heard_of_however_late_its_frames_come(make_swarm):
    swarm, until = make_swarm(4), 9.0
    late, decided, plain = swarm.leaders()[-1], [], swarm.do
    swarm.lose = lambda a, b, message: b == late and isinstance(message, tuple) and swarm.now < until

    def noting(peer, effects):
        decided.extend((peer, swarm.now, effect.known_since) for effect in effects if isinstance(effect, Decide))
        plain(peer, effects)

    swarm.do = noting
    swarm.offer_all()
    assert swarm.run(lambda: len(decided) == 4)
    known = {peer: since for peer, _, since in decided}
    (applied,) = (now for peer, now, _ in decided if peer == late)
    assert applied >= until
    assert max(known.values()) <= 1.0
    assert {peer for peer, now, since in decided if now == since} == set(swarm.members) - {late}


def test_a_frame_is_asked_for_in_the_round_in_which_it_is_needed(make_swarm):
    """Carried out after the commit that came with it, a request was taken for one of the next round."""
    swarm, rounds = make_swarm(3), []
    silent, fetch = swarm.members[0], swarm.fetch
    swarm.lose = lambda a, b, message: a == silent and isinstance(message, tuple)
    swarm.fetch = lambda peer, effect: rounds.append((swarm.rounds_done(peer) + 1, effect.round)) or fetch(peer, effect)
    for _ in range(3):
        goal = swarm.head.round + 1
        swarm.offer_all()
        assert swarm.run(lambda: min(map(swarm.rounds_done, swarm.members)) >= goal)  # noqa: B023  it ends before
    assert rounds
    assert all(open_ == needed for open_, needed in rounds)


@pytest.mark.parametrize("reduce", [False, True], ids=["gather", "reduce"])
@pytest.mark.parametrize("seed", few_of(range(20), 4))
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


def test_a_leader_whom_nobody_hears_does_not_plan_anew_at_every_failed_send(make_swarm):
    swarm = make_swarm(3, reduce=True)
    _, *others = swarm.leaders()
    swarm.offer(others[0])
    assert swarm.run(lambda: not swarm.queue)
    for other in others:
        swarm.kill(other)
    swarm.delivered = 0

    def count(delivered: int) -> None:
        assert delivered < 500, "one send after the other"

    swarm.on_delivery = count
    swarm.run(lambda: False, 60.0)
    assert swarm.delivered > 2


def test_an_offer_of_more_bytes_than_any_frame_may_have_is_refused(make_swarm):
    swarm = make_swarm(3)
    machine, liar = swarm.machine(swarm.members[0]), swarm.members[1]
    machine.state.terms = replace(machine.state.terms, largest=1000)
    head = machine.head
    offer = m.Offer(head.epoch, 1, 0, head.anchor, bytes(32), 1001, 5, 50)
    with pytest.raises(PayloadError, match="offer of 1001 bytes, 1000 are possible here"):
        machine.receive(liar, offer, swarm.now)
    assert not machine.state.round.offers


@pytest.mark.parametrize("comes", [True, False])
def test_a_frame_that_was_offered_in_time_has_the_time_that_its_bytes_need(make_swarm, comes):
    """The deadline passed it over, round after round, where the frames of all took longer than the ceiling."""
    swarm, takes = make_swarm(3), 20.0
    slow = swarm.leaders()[-1]
    others = [peer for peer in swarm.members if peer != slow]
    swarm.lose = lambda sender, to, message: sender == slow and not isinstance(message, m.Offer)
    for host in swarm.hosts.values():
        host.machine.state.terms = replace(host.machine.state.terms, takes=lambda nbytes, peer, members: takes)
    swarm.offer_all()
    decided = [swarm.machine(peer).state.recent for peer in others]
    assert not swarm.run(lambda: any(decided), limit=2 * SLACK * takes - 2.0)
    if comes:
        swarm.lose = lambda sender, to, message: False
    assert swarm.run(lambda: all(decided), limit=10.0)
    assert set(swarm.named(others[0])) == set(swarm.members if comes else others)


def test_who_offers_and_does_not_send_is_waited_for_as_long_once_until_it_sends_again(make_swarm):
    swarm, takes = make_swarm(3), 20.0
    slow = swarm.leaders()[-1]
    machines = [host.machine for host in swarm.hosts.values()]
    for machine in machines:
        machine.state.terms = replace(machine.state.terms, takes=lambda nbytes, peer, members: takes)

    def seconds_of_a_round(sends):
        swarm.lose = lambda sender, to, message: sender == slow and not (sends or isinstance(message, m.Offer))
        began, round_ = swarm.now, machines[0].head.round + 1
        swarm.offer_all()
        assert swarm.run(lambda: all(machine.head.round == round_ for machine in machines), limit=100.0)
        return swarm.now - began

    assert seconds_of_a_round(sends=False) >= 2 * SLACK * takes
    assert seconds_of_a_round(sends=False) < swarm.terms.ceiling + 2.0
    assert seconds_of_a_round(sends=True) < 2.0
    assert seconds_of_a_round(sends=False) >= 2 * SLACK * takes


def test_who_was_passed_over_rests_longer_each_time_that_it_was_waited_for_in_vain():
    unsent, peer, waited_for = Unsent(), bytes(32), []
    for round_ in range(1, 200):
        if unsent.is_waited_for(peer, round_):
            waited_for.append(round_)
        unsent.note_absence(peer, round_)
    rests = [later - earlier - 1 for earlier, later in pairwise(waited_for)]
    assert rests == [FIRST_REST, 8, 16, 32, LONGEST_REST, LONGEST_REST]
    unsent.note_frame(peer)
    assert unsent.is_waited_for(peer, 200)
