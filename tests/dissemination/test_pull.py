"""What is dropped when frames do not fit: the past first, then a flooder's own, never what the open round needs."""

from __future__ import annotations

import pytest

from decentral.dissemination.pull import PER_SENDER, FrameStore
from decentral.errors import PayloadError
from decentral.wire.frames import HEADER_NBYTES, Frame, FrameKind, Header, seal
from decentral.wire.keys import Signer

BODY = 1000
SIZE = BODY + HEADER_NBYTES
SIGNERS = [Signer(bytes([n]) * 32) for n in range(1, 5)]


def frame(signer: Signer, round_: int, number: int = 0) -> Frame:
    header = Header(FrameKind.RESULT, bytes(32), 0, round_, 0, 0, 1, number, bytes(32), signer.peer, 1, 1)
    return seal(header, bytes(BODY), signer)


def test_frames_of_the_open_round_stay_though_they_are_more_than_the_capacity():
    store = FrameStore(2 * SIZE)
    past = [frame(signer, 4) for signer in SIGNERS[:2]]
    for one in past:
        store.add(one)
    store.open(5, 8 * SIZE)
    needed = [frame(signer, 5) for signer in SIGNERS]
    assert [store.add(one) for one in needed] == [[], [], [], []]
    assert all(one.hash in store for one in needed)
    assert not any(one.hash in store for one in past)


def test_a_flooder_pushes_out_its_own_frames_only_and_memory_stays_bounded():
    store = FrameStore(2 * SIZE)
    store.open(5, 8 * SIZE)
    honest = [frame(signer, 5) for signer in SIGNERS[1:]]
    for one in honest:
        store.add(one)
    flood = [frame(SIGNERS[0], 5, number) for number in range(PER_SENDER)]
    dropped = [key for one in flood for key in store.add(one)]
    assert store.nbytes <= 8 * SIZE
    assert all(one.hash in store for one in honest)
    assert set(dropped) <= {one.hash for one in flood}


def test_one_sender_may_have_so_many_frames_in_a_round():
    store = FrameStore(1 << 30)
    for number in range(PER_SENDER):
        store.add(frame(SIGNERS[0], 5, number))
    with pytest.raises(PayloadError, match="more than 64 frames of one sender"):
        store.add(frame(SIGNERS[0], 5, PER_SENDER))
