"""The table of leases: newest word, local clock, bounded."""

import pytest

from decentral.errors import PayloadError
from decentral.swarm import leases
from decentral.swarm.leases import (
    LeaseTable,
    OwnLease,
    lease_bytes,
    name_in,
    read_lease,
    read_leases,
    write_leases,
)
from decentral.wire.keys import Signer
from decentral.wire.messages import Lease, seal_lease

RUN = b"r" * 32
ME = Signer(b"m" * 32)
PEERS = [Signer(bytes([number]) * 32) for number in range(1, 9)]


def lease(signer, sequence, *, run=RUN, ttl=10, **fields):
    told = {"addresses": (), "epoch": 0, "round": 0, "digest": bytes(32), "state": 0, "uplink": 0, "version": "1"}
    return seal_lease(Lease(run=run, peer=signer.peer, sequence=sequence, ttl=ttl, **told | fields), signer)


def table(capacity=4):
    return LeaseTable(ME.peer, RUN, ttl=10.0, capacity=capacity)


def test_a_lease_counts_for_its_life_from_when_it_came():
    leases, peer = table(), PEERS[0].peer
    assert leases.take(lease(PEERS[0], 1), now=100.0)
    assert list(leases.live(109.9)) == [peer]
    assert leases.live(110.0) == {}
    assert leases.next_end() == 110.0
    assert leases.expire(110.0) == [peer]
    assert leases.heard(peer, 113.0) == 13.0
    assert leases.heard(PEERS[1].peer, 113.0) is None


def test_who_is_live_is_one_mapping_until_somebody_comes_or_goes():
    """Who looks several times a second takes the same mapping for the same company (`decentral.node.node.Company`)."""
    leases, (one, other, third) = table(), (PEERS[number] for number in range(3))
    leases.take(lease(one, 1), now=100.0)
    leases.take(lease(other, 1), now=100.0)
    first = leases.live(101.0)
    leases.take(lease(other, 2, round=7), now=104.0)  # it renews, and moves on
    assert leases.live(105.0) is first
    leases.take(lease(third, 1), now=105.0)
    second = leases.live(105.0)
    assert second is not first
    assert list(second) == sorted(signer.peer for signer in (one, other, third))
    assert leases.live(111.0) is not second, "a lease has ended, and nobody has moved it to the silent ones yet"
    leases.expire(111.0)
    third_look = leases.live(111.0)
    assert one.peer not in third_look
    assert leases.live(112.0) is third_look
    leases.goodbye(third.peer, 112.0)
    assert list(leases.live(112.0)) == [other.peer]


def test_a_peer_was_last_heard_of_when_its_lease_began_or_it_said_goodbye():
    """Also by way of others, and when it is silent since."""
    leases, (one, other, third) = table(), (PEERS[number] for number in range(3))
    assert leases.heard(one.peer, 100.0) is None
    leases.take(lease(one, 1), now=100.0)
    leases.take(lease(other, 1), now=100.0, remaining=4.0)
    leases.take(lease(third, 1), now=100.0)
    assert [leases.heard(who.peer, 103.0) for who in (one, other)] == [3.0, 9.0]
    leases.goodbye(third.peer, 102.0)
    leases.expire(120.0)
    assert [leases.heard(who.peer, 130.0) for who in (one, other, third)] == [30.0, 36.0, 28.0]


def test_a_peer_cannot_give_itself_a_longer_life_than_the_run_allows():
    leases = table()
    leases.take(lease(PEERS[0], 1, ttl=10**6), now=0.0)
    assert leases.expire(10.0) == [PEERS[0].peer]


def test_a_renewal_that_says_nothing_new_prolongs_and_is_no_news():
    leases = table()
    assert leases.take(lease(PEERS[0], 1), now=0.0)
    assert not leases.take(lease(PEERS[0], 2), now=9.0)
    assert leases.take(lease(PEERS[0], 3, round=7), now=9.0)
    assert leases.live(18.0)[PEERS[0].peer].round == 7


def test_an_older_word_never_replaces_a_newer_one():
    leases = table()
    leases.take(lease(PEERS[0], 5, round=5), now=0.0)
    assert not leases.take(lease(PEERS[0], 4, round=4), now=1.0)
    assert leases.live(2.0)[PEERS[0].peer].round == 5


def test_passing_a_lease_on_never_prolongs_it():
    leases = table()
    leases.take(lease(PEERS[0], 5), now=0.0)
    assert not leases.take(lease(PEERS[0], 5), now=9.0, remaining=10.0)
    assert leases.expire(10.0) == [PEERS[0].peer]
    assert not leases.take(lease(PEERS[0], 5), now=11.0, remaining=10.0), "and never revives it"
    assert leases.take(lease(PEERS[0], 6), now=11.0, remaining=1.5)
    assert leases.expire(12.5) == [PEERS[0].peer]


def test_goodbye_counts_at_once_and_is_not_undone_by_what_others_still_pass_on():
    leases, peer = table(), PEERS[0].peer
    leases.take(lease(PEERS[0], 5), now=0.0)
    assert leases.goodbye(peer, 1.0)
    assert not leases.goodbye(peer, 1.0)
    assert leases.live(1.0) == {}
    assert not leases.take(lease(PEERS[0], 5), now=2.0, remaining=9.0)
    assert leases.last_words() == []


def test_who_falls_silent_without_a_goodbye_is_missed():
    leases = table()
    for signer in PEERS[:2]:
        leases.take(lease(signer, 1), now=0.0)
    leases.expire(10.0)
    assert [missed.peer for missed in leases.last_words()] == sorted(signer.peer for signer in PEERS[:2])
    leases.take(lease(PEERS[0], 1), now=11.0)
    assert [missed.peer for missed in leases.last_words()] == [PEERS[1].peer]


def test_a_full_table_keeps_whom_it_knows_and_takes_nobody_else():
    leases = table(capacity=2)
    for signer in PEERS[:3]:
        leases.take(lease(signer, 1), now=0.0)
    assert set(leases.live(1.0)) == {signer.peer for signer in PEERS[:2]}
    leases.expire(10.0)
    for signer in PEERS[2:6]:
        leases.take(lease(signer, 1), now=10.0)
    leases.expire(20.0)
    assert len(leases.last_words()) == 2


def test_ones_own_lease_is_nobody_else_here():
    leases = table()
    assert not leases.take(lease(ME, 99), now=0.0)
    assert leases.live(0.0) == {}


def test_a_lease_of_another_run_is_refused_with_both_named():
    with pytest.raises(PayloadError, match="lease of run 7878"):
        table().take(lease(PEERS[0], 1, run=b"x" * 32), now=0.0)


def test_a_list_of_leases_comes_back_with_the_life_that_is_left():
    entries = [(1.5, lease(PEERS[0], 1)), (0.0, lease(PEERS[1], 2, addresses=("/ip4/1.2.3.4/tcp/5",)))]
    assert list(read_leases(write_leases(entries))) == entries


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("0.1.0/Anna", "Anna"),
        ("0.1.0", ""),  # of who has no name, and of every older version
        ("0.1.0/", ""),
        ("0.1.0/a/b", ""),
        ("0.1.0/<b>Anna</b>", ""),
        (f"0.1.0/{'a' * 17}", ""),
    ],
)
def test_a_lease_tells_a_name_behind_the_version_and_nothing_that_is_none(version: str, name: str):
    assert name_in(lease(PEERS[0], 1, version=version)) == name


def test_a_name_travels_with_the_lease_of_its_peer_however_long_the_version_is(monkeypatch):
    monkeypatch.setattr(leases, "package_version", lambda: "0.1.0.dev123+g0123456789abcdef")
    own = OwnLease(PEERS[0], RUN, 15.0, lambda: ())
    own.call("x" * 16)
    sealed = read_lease(lease_bytes(own.seal()))
    assert name_in(sealed) == "x" * 16
    assert sealed.version == f"0.1.0.dev123+g0/{'x' * 16}"
