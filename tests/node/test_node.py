"""Nodes of one run in memory: who trains with a peer, what all hold after each round, and what stalls nobody."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, replace
from types import SimpleNamespace

import anyio
import pytest
import torch

from decentral.consensus.chain import Head
from decentral.consensus.paxos import Acceptor
from decentral.errors import DiskError, VersionError
from decentral.node.node import Company, Uplinks
from decentral.swarm.hello import HELLO, WIRE_VERSION
from decentral.transport.requests import serve_requests
from decentral.wire.frames import parse
from decentral.wire.messages import PRIVATE, FrameRef, Record, vote_text
from tests.kit.nodes import run_in_lab, scene, small_terms, tiny_model
from tests.kit.tables import ALONG_DIRECTIONS, DOSED_WIRES, SYNCHRONOUS, SYNCHRONOUS_WIRES, covering, long_but

ME, A, B = b"me", b"a", b"b"


def nobody_said_goodbye(peer: bytes) -> bool:
    return False


def test_being_left_alone_is_told_once_with_those_who_were_here_last() -> None:
    company = Company()
    looks = [([A, B], (ME, A, B)), ([B], (ME, B)), ([], (ME,)), ([], (ME,))]
    assert [company.look(live, members, lambda peer: True) for live, members in looks] == [False, False, True, False]
    assert (company.gone, company.left) == ({B}, True)


def test_who_fell_silent_did_not_leave_and_is_company_again_when_it_is_heard_of() -> None:
    company = Company()
    company.look([A], (ME, A), nobody_said_goodbye)
    assert company.look([], (ME, A), nobody_said_goodbye)
    assert (company.gone, company.left) == ({A}, False)
    assert not company.look([A], (ME, A), nobody_said_goodbye)
    assert company.gone == frozenset()


def test_who_only_asks_for_the_terms_is_no_company_and_who_rests_is() -> None:
    company = Company()
    assert not company.look([A], (ME,), nobody_said_goodbye)
    assert not company.look([], (ME,), nobody_said_goodbye)
    company.look([B], (ME, B), nobody_said_goodbye)
    assert not company.look([B], (ME,), nobody_said_goodbye)  # it paused, and is no member for now
    assert company.here == {B}


# ---- every kind of method ----


@pytest.mark.parametrize("preset", DOSED_WIRES)
@scene(peers=4, rounds=4)
async def test_those_who_stay_hold_the_same_bits_whoever_dies_and_whoever_comes_late(lab, preset):
    assert all(len(member.digests) >= 4 for member in lab.members)
    lab.members[2].kill()
    await lab.rounds(3)
    await lab.all_members()
    joiner = lab.add()
    await lab.all_members()
    await lab.rounds(4)
    lab.check_equal()
    assert joiner.node.driver.state.contributed >= 2
    assert len(joiner.digests) >= 4


ALIKE = {"relative_temperature": 1e6}  # at 1 EDiT follows the peer whose change is the shortest
QUICK: dict[str, dict[str, dict[str, float | str]]] = {  # what shows in 12 rounds
    "a_edit": {"outer": ALIKE},
    "cgad": {"outer": {"learning_rate": 1.0}},  # Adam's steps are as long as that, whatever the changes are
    "demo_sgd": {"outer": {"step": "mean", "learning_rate": 1.0}, "compressor": {"chain": "none", "feedback": "none"}},
    "edit": {"outer": ALIKE},
    "masha": {"outer": {"learning_rate": 1.0}},  # the lab's rounds solve all of it: 4 parts are stable up to that
    "sparta": {"outer": {"parts": 4, "whole": 6}},
}
MOVED_BY_FRAMES = [name for name in SYNCHRONOUS if name not in ALONG_DIRECTIONS]


@pytest.mark.parametrize("preset", long_but(covering(SYNCHRONOUS_WIRES), MOVED_BY_FRAMES))
@scene(lambda preset: small_terms(preset).changed(**QUICK.get(preset, {})), peers=3)
async def test_the_anchor_moves_towards_the_mean_of_the_targets(lab, preset):
    mean = sum(member.target(0) for member in lab.members) / 3
    before = lab.members[0].node.replica.anchors[0].sub(mean).norm()
    await lab.rounds(12)
    assert lab.members[0].node.replica.anchors[0].sub(mean).norm() < 0.9 * before


@pytest.mark.parametrize("preset", DOSED_WIRES)
@scene(lambda preset: small_terms(preset, lease=20.0, shrink_after=60.0).changed(run={"rounds": 4}), peers=3, rounds=2)
async def test_who_missed_the_last_commit_gets_it_before_the_others_are_gone(lab, preset):
    *others, late = lab.members
    lab.cut([late], others)
    await lab.until(lambda: all(member.node.driver.head.final for member in others))
    assert not late.node.driver.head.final
    for member in others:
        lab.group.start_soon(member.end)
    lab.heal([late], others)
    await lab.until(lambda: late.node.driver.head.final, limit=60.0)
    await lab.until(lambda: lab.alive() == [late], limit=30.0)
    lab.check_equal()


def test_equal_seeds_give_equal_chains():
    digests = []

    async def script(lab):
        await lab.start(3, rounds=3)
        digests.append(dict(lab.members[0].digests))

    for _ in range(2):
        run_in_lab(small_terms("sparseloco"), script, make_model=tiny_model)
    shared = set(digests[0]) & set(digests[1])
    assert len(shared) >= 3
    assert all(digests[0][r] == digests[1][r] for r in shared)


# ---- who comes, who sleeps, who forgets ----


async def says_otherwise(peer: bytes, data: bytes) -> bytes:
    return json.dumps({"wire": WIRE_VERSION - 1, "version": "0.0.1"}).encode()


@pytest.mark.parametrize("others", [2, 0])
def test_one_that_means_another_run_or_version_keeps_a_newcomer_from_nobody_else(others):
    """The first of the directory decided for all: in a swarm that is being upgraded, or with one that lies."""

    async def script(lab):
        await lab.start(1 + others, rounds=1)
        first = min(lab.members, key=lambda member: member.signer.peer)
        serve = first.transport.services.handlers.__setitem__
        handlers = SimpleNamespace(letters=None, budget=first.transport.budget, serve=serve)
        serve_requests(handlers, HELLO, says_otherwise, limit=64)
        joiner = lab.add()
        await lab.until(lambda: joiner.node.ready.is_set())

    if others:
        run_in_lab(small_terms("sparseloco"), script)
        return
    with pytest.RaisesGroup(VersionError, flatten_subgroups=True):
        run_in_lab(small_terms("sparseloco"), script)


@scene()
async def test_newcomers_without_anybody_in_step_wait_and_never_found_a_chain_of_their_own(lab):
    founder, *newcomers = (lab.add() for _ in range(4))
    lab.cut(newcomers, [founder])
    for a in newcomers:
        a.node.directory.add_bootstrap(b.transport.addresses()[0] for b in newcomers if b is not a)
    await anyio.sleep(10)
    assert all(len(member.node.directory.live()) == 2 for member in newcomers), "they know each other"
    assert not any(member.node.driver.state.running for member in newcomers)
    lab.heal(newcomers, [founder])
    await lab.all_members()
    await lab.rounds(2)
    lab.check_equal()


@scene(peers=2)
async def test_a_member_that_stands_elsewhere_in_the_same_round_is_compared_with(lab):
    """It may have forked and left this peer out; then no message of its rounds comes, and gossips never knew."""
    for member in lab.members:
        member.idle = True
    await anyio.sleep(2.0)
    driver, other = lab.members[0].node.driver, lab.members[1].signer.peer
    asked: list[bytes] = []
    watch, lease = driver.watch, driver.watch.lease
    driver.state.catch_up.ask = asked.append
    live = watch.directory.live()
    elsewhere = {other: replace(live[other], round=driver.head.round, digest=b"\xff" * 32)}
    watch.directory.live = lambda: elsewhere
    now = anyio.current_time()
    watch.look_for_other_chains(now)
    assert asked == [], "it may have adopted this one since"
    watch.look_for_other_chains(now + 1.5 * lease)
    assert asked == [other]
    elsewhere[other] = replace(live[other], round=driver.head.round - 1)
    watch.look_for_other_chains(now + 3 * lease)
    watch.look_for_other_chains(now + 9 * lease)
    assert asked == [other], "a member that is behind finds this peer by itself"


@scene(peers=3, rounds=1)
async def test_peers_that_all_lost_the_end_of_their_chain_go_on_once_each_has_said_so(lab):
    for member in lab.members:
        machine = member.node.driver.machine
        machine.state.remembered = Acceptor(machine.head.round + 10)
    began = anyio.current_time()
    await lab.rounds(2)
    assert anyio.current_time() - began > lab.manifest.swarm.lease
    assert all(member.happened("forgot") for member in lab.members)


@pytest.mark.parametrize("lost", ["frames", "reason"])
@scene(peers=2, rounds=1)
async def test_a_vote_for_what_nobody_votes_for_any_more_binds_for_a_lease_and_not_for_ever(lab, lost):
    """What came of the vote is lost with a part of the disk: of a record that drops a member who is back by now, or one
    with frames that no disk has any more, for which both have voted.
    """
    first = lab.members[0]
    round_, me = first.node.driver.machine.state, first.signer.peer
    while not nobody_voted(lab):
        await anyio.sleep(0.01)
    frames = (FrameRef(me, bytes(32), 0, 4, 4, round_.head.outer_step),) if lost == "frames" else ()
    kept = round_.head.members if lost == "frames" else (me,)
    record = successor(round_.head, frames, kept)
    bound = lab.members if lost == "frames" else [first]
    for member in bound:
        state = member.node.driver.machine.state
        proposer = next(one.signer for one in lab.members if one.signer.peer == state.leader_of(3))
        text = vote_text(record.run, record.epoch, record.round, 3, record.hash)
        state.acceptor = Acceptor(record.round, 3, 3, record, proposer.sign(text))
    began = anyio.current_time()
    await lab.rounds(2)
    assert anyio.current_time() - began > lab.manifest.swarm.lease
    assert all(len(member.happened("forgot")) == 1 for member in bound)
    lab.check_equal()


def nobody_voted(lab) -> bool:
    """Whether all stand at one head, and no vote for what follows is on its way."""
    rounds = [member.node.driver.machine.state for member in lab.members]
    return len({round_.head.hash for round_ in rounds}) == 1 and all(r.acceptor.accepted is None for r in rounds)


def successor(head: Head, frames: tuple[FrameRef, ...], next_members: tuple[bytes, ...]) -> Record:
    """A record that may follow ``head``."""
    at = (head.run, head.epoch, head.round + 1, head.outer_step, 0, 0, head.hash, head.anchor)
    return Record(*at, head.members, frames, (), (), next_members, False)


@scene(peers=2)
async def test_a_peer_that_switched_branches_serves_the_new_one_only(lab):
    """Two founders of one run, each with a chain of its own, that meet."""
    heavier, _ = lab.members
    other = lab.add(founder=True)
    lab.cut([other], lab.members[:2])
    await lab.until(lambda: heavier.rounds >= 8 and other.rounds >= 4)
    old = [(commit.record.round, commit.record.hash) for commit in other.log]
    other.idle = True
    lab.heal([other], lab.members[:2])
    await lab.until(lambda: other.happened("resynced"))
    await lab.all_members()
    await lab.rounds(2)
    machine = other.node.driver.machine
    assert machine.state.history.newest_of(old) is None
    rounds = sorted(machine.state.recent)
    assert rounds == list(range(rounds[0], machine.head.round + 1)), "commits of both branches, or a gap"
    for older, newer in itertools.pairwise(rounds):
        assert machine.state.recent[newer].record.previous == machine.state.recent[older].record.hash


# ---- what is written, and when ----


@scene()
async def test_the_debt_is_booked_with_the_commit_and_not_before(lab):
    member = lab.add()
    await lab.all_members()
    await lab.until(lambda: member.node.driver.state.pending is not None or member.rounds > 0)
    await lab.rounds(1)
    update = next(a for a in member.all_updates if a.contribution is not None)
    sent = member.node.replica.codec.decode(update.contribution.encoded.body, member.node.replica.shapes(0))
    total = sent + update.contribution.encoded.feedback["debt"]
    torch.testing.assert_close(total, update.contribution.gradient_N)


@scene(peers=3, rounds=1)
async def test_a_full_disk_ends_the_peer_with_its_error_and_the_others_go_on(lab):
    victim = lab.members[1]
    before = victim.node.replica.anchors[0].clone()

    def refuse(commit, frames):
        raise DiskError("no space left")

    victim.node.driver.state.ledger.append = refuse
    await lab.until(lambda: victim.failure is not None)
    assert torch.equal(victim.node.replica.anchors[0], before) or len(victim.digests) > 1
    assert victim.log[-1].record.round == max(victim.digests), "nothing was applied that was not logged"
    await lab.rounds(3)
    lab.check_equal()


@scene(peers=2)
async def test_the_frames_of_a_vote_are_durable_before_the_vote_is(lab):
    kept, votes = set[bytes](), list[int]()

    def vote(blob):
        record = Acceptor.from_bytes(blob).accepted
        if record is not None and record.frames:
            votes.append(record.round)
            assert {ref.frame for ref in record.frames} <= kept

    def keep(record, frames):
        kept.update(parse(data, lambda header: 1 << 30).hash for data in frames)

    ledger = lab.members[0].node.driver.state.ledger
    ledger.keep, ledger.save_acceptor = keep, vote
    await lab.rounds(3)
    assert len(votes) >= 3


# ---- what leases say of uplinks, and the time that frames need by it ----

PEERS = [bytes([number]) * 32 for number in range(4)]
NBYTES = 1_000_000


@dataclass
class Told:
    """A lease, as far as it matters here."""

    peer: bytes
    uplink: int  # bit/s
    state: int = 0


class Directory:
    def __init__(self, mbits, private=()):
        leases = [
            Told(peer, int(mbit * 1e6), PRIVATE * (n in private))
            for n, (peer, mbit) in enumerate(zip(PEERS, mbits, strict=True))
        ]
        self.me, self.others = leases[0], {lease.peer: lease for lease in leases[1:]}
        self.own = self

    def draft(self):
        return self.me

    def live(self):
        return self.others


def uplinks(*mbits, reduces=False, private=(), clock=lambda: 0.0):
    return Uplinks(Directory(mbits, private), reduces, clock)


@pytest.mark.parametrize(
    ("mbits", "reduces", "of", "seconds"),
    [
        ((0, 0, 0, 0), False, 1, None),
        ((8, 8, 8, 8), False, 1, 3.0),
        ((8, 8, 8, 8), True, 1, 2.0),
        ((8, 8, 8, 1), False, 3, 8.0),
        ((8, 8, 8, 0.000008), True, 3, 20.0),
    ],
    ids=["nothing measured", "copies for all", "twice the body", "a thin one: one copy", "a tenth of the usual"],
)
def test_a_frame_needs_the_time_of_the_copies_that_its_sender_makes(mbits, reduces, of, seconds):
    found = uplinks(*mbits, reduces=reduces).takes(NBYTES, PEERS[of], PEERS)
    assert found == (seconds if seconds is None else pytest.approx(seconds))


def test_an_uplink_that_is_not_measured_yet_is_taken_for_a_usual_one():
    assert [line.rate for line in uplinks(8, 0, 8, 8).lines_of(PEERS)] == [1e6] * 4


def test_private_peers_own_nothing_of_a_reduce_unless_all_are_private():
    assert uplinks(8, 8, 8, 8, reduces=True, private={1, 2}).for_owners(PEERS) == [1e6, 0.0, 0.0, 1e6]
    assert uplinks(8, 8, 8, 8, reduces=True, private={0, 1, 2, 3}).for_owners(PEERS) == [1e6] * 4


def test_a_claimed_line_owns_no_more_of_a_reduce_than_what_was_had_from_it():
    claims = uplinks(8, 8, 8, 8_000_000, reduces=True)
    assert claims.for_owners(PEERS) == [1e6] * 4, "nothing was had from anybody: what is usual"
    had = {PEERS[1]: 5e5, PEERS[2]: 1e5}
    claims.received = had.get
    assert claims.for_owners(PEERS) == [1e6, 1e6, pytest.approx(1e6 / 3), 1e6], "of the last nothing was had yet"
    claims.received = {PEERS[1]: 5e5, PEERS[2]: 5e5, PEERS[3]: 2e6}.get
    assert claims.for_owners(PEERS) == [1e6, 1e6, 1e6, 4e6]


def test_of_two_the_other_owns_no_more_than_half_whatever_it_claims():
    claims = uplinks(8, 8_000_000, 8, 8, reduces=True)
    for had in ({}, {PEERS[1]: 5e5}):
        claims.received = had.get
        assert claims.for_owners(PEERS[:2]) == [1e6, 1e6]


def test_equal_lines_own_alike_although_what_was_had_of_them_differs():
    """Measured on four lines of 2.5 MB/s: the largest share was 0.39, and a round took 7.1 s, not 4.8."""
    claims = uplinks(14, 15, 14, 16, reduces=True)
    claims.received = {PEERS[1]: 1.14e6, PEERS[2]: 1.02e6, PEERS[3]: 1.5e6}.get
    assert len(set(claims.for_owners(PEERS))) == 1


def test_a_time_is_remembered_for_a_moment_and_no_longer():
    times = iter([0.0, 0.99, 1.0, 0.1])
    found = uplinks(8, 8, 8, 8, reduces=True, clock=lambda: next(times))
    takes = []
    for mbit in (8, 4, 2, 1):
        found.directory.others[PEERS[1]].uplink = int(mbit * 1e6)
        takes.append(found.takes(NBYTES, PEERS[1], PEERS))
    assert takes == [2.0, 2.0, 8.0, 16.0]  # a clock that goes back counts as another time
