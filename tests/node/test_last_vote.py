"""What a store finds after a crash: half-written frames, votes without a checkpoint."""

from __future__ import annotations

import hashlib

import pytest
import torch

from decentral.consensus.chain import Head
from decentral.consensus.paxos import Acceptor
from decentral.node.durable_store import DurableStore
from decentral.wire.keys import Signer
from decentral.wire.messages import Record

RUN, OTHER = bytes(32), b"\x01" * 32
ME = Signer(hashlib.blake2b(b"store", digest_size=32).digest()).peer


def head_at(round_: int) -> Head:
    return Head(RUN, 0, round_, round_, bytes(32), bytes(32), (ME,))


def record_of(run: bytes) -> Record:
    return Record(
        run=run,
        epoch=0,
        round=5,
        outer_step=4,
        fragment=0,
        plan=0,
        previous=bytes(32),
        base=bytes(32),
        members=(ME,),
        frames=(),
        contributors=(),
        partition=(),
        next_members=(ME,),
        final=False,
    )


@pytest.fixture
def store(tmp_path):
    with_frames = tmp_path / "frames"
    with_frames.mkdir()
    (with_frames / ".tmp-000000000001-ab").write_bytes(b"half")
    (with_frames / "000000000001-ab").write_bytes(b"whole")
    made = DurableStore(tmp_path)
    yield made
    made.close()


def test_frames_that_a_crash_left_half_written_are_removed(store, tmp_path):
    assert [path.name for path in (tmp_path / "frames").iterdir()] == ["000000000001-ab"]


def test_a_half_written_frame_does_not_stop_the_third_checkpoint(store, tmp_path):
    (tmp_path / "frames" / ".tmp-000000000002-cd").write_bytes(b"half")  # a write under way on another thread
    for round_ in (3, 4, 5):
        store.save(head_at(round_), {"anchor/0": torch.zeros(1)}, {})
    assert not (tmp_path / "frames" / "000000000001-ab").exists()


def test_the_last_vote_is_known_without_a_checkpoint_unless_it_was_in_another_run(store):
    assert store.last_vote(RUN) is None
    for run, binds in ((RUN, True), (OTHER, False)):
        voted = Acceptor(5, 1, 1, record_of(run))
        store.acceptor.write(voted.to_bytes())
        assert store.last_vote(RUN) == (voted if binds else None)
