"""What leases say of uplinks, and the time that frames need by it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from decentral.node.node import Uplinks
from decentral.wire.messages import PRIVATE

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
        self._own, self.others = leases[0], {lease.peer: lease for lease in leases[1:]}

    def draft(self):
        return self._own

    def live(self):
        return self.others


def uplinks(directory, *, reduces, clock=lambda: 0.0):
    return Uplinks(directory, reduces, clock)


def test_nothing_is_expected_while_nobody_has_measured_anything():
    assert uplinks(Directory([0, 0, 0, 0]), reduces=False).takes(NBYTES, PEERS[1], PEERS) is None


def test_an_uplink_that_is_not_measured_yet_is_taken_for_a_usual_one():
    lines = uplinks(Directory([8, 0, 8, 8]), reduces=False).lines_of(PEERS)
    assert [line.rate for line in lines] == [1e6] * 4


@pytest.mark.parametrize(("reduces", "seconds"), [(False, 3.0), (True, 2.0)], ids=["gather", "reduce"])
def test_equal_peers_need_their_copies_or_twice_their_body(reduces, seconds):
    assert uplinks(Directory([8, 8, 8, 8]), reduces=reduces).takes(NBYTES, PEERS[1], PEERS) == pytest.approx(seconds)


def test_a_thin_peer_whose_frame_others_pass_on_needs_one_copy():
    assert uplinks(Directory([8, 8, 8, 1]), reduces=False).takes(NBYTES, PEERS[3], PEERS) == pytest.approx(8.0)


def test_who_claims_next_to_nothing_gets_the_time_of_a_tenth_of_the_usual_uplink():
    takes = uplinks(Directory([8, 8, 8, 0.000008]), reduces=True).takes(NBYTES, PEERS[3], PEERS)
    assert takes == pytest.approx(2.0 * 10)


def test_private_peers_own_nothing_of_a_reduce_unless_all_are_private():
    assert uplinks(Directory([8, 8, 8, 8], private={1, 2}), reduces=True).for_owners(PEERS) == [1e6, 0.0, 0.0, 1e6]
    assert uplinks(Directory([8, 8, 8, 8], private={0, 1, 2, 3}), reduces=True).for_owners(PEERS) == [1e6] * 4


def test_a_time_is_remembered_for_a_moment_and_no_longer():
    times = iter([0.0, 0.99, 1.0, 0.1])
    told = Directory([8, 8, 8, 8])
    found = uplinks(told, reduces=True, clock=lambda: next(times))
    takes = []
    for mbit in (8, 4, 2, 1):
        told.others[PEERS[1]].uplink = int(mbit * 1e6)
        takes.append(found.takes(NBYTES, PEERS[1], PEERS))
    assert takes == [2.0, 2.0, 8.0, 16.0]  # a clock that goes back counts as another time
