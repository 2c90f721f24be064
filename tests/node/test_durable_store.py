"""What a restart makes of checkpoints, journal and frames that do not fit together."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decentral.consensus.paxos import Acceptor
from decentral.errors import PayloadError
from decentral.node.durable_store import DurableStore
from decentral.replica.contribution import header_after
from decentral.replica.replica import OWED
from decentral.simulate.disk import RecordingDisk
from decentral.state.durable import DISK, Disk
from decentral.wire.frames import FrameKind, seal
from decentral.wire.messages import Commit, FrameRef
from tests.kit.history import ME, RUN, SIGNERS, History, make_history
from tests.kit.liars import record_after
from tests.kit.life import CHECKPOINT_EVERY, Life, found_in
from tests.kit.machines import START, record, ref, signer_of

ROUNDS = 9


@pytest.fixture(scope="module")
def history() -> History:
    return make_history(ROUNDS)


def lived_in(history: History, folder: Path, disk: Disk = DISK, checkpoint_every: int = CHECKPOINT_EVERY) -> Life:
    return Life(history, folder, lambda word, round_: None, disk, checkpoint_every)


@pytest.fixture
def lived(history, tmp_path) -> Path:
    """The folder of a peer that lived through nine rounds, with checkpoints at 4, 6 and 8."""
    life = lived_in(history, tmp_path)
    life.go_on(ROUNDS)
    life.close()
    return tmp_path


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_the_last_commit_is_reached_from_every_kept_checkpoint(history, lived, damaged):
    for folder in sorted((lived / "checkpoints").iterdir())[3 - damaged :]:
        damage(folder / "tensors.safetensors")
    found = found_in(history, lived)
    assert (found.checkpoint, found.round, found.equal) == (8 - 2 * damaged, ROUNDS, True)
    assert len(found.passed_over) == damaged


def test_commits_and_frames_that_no_checkpoint_needs_are_dropped(history, lived):
    assert len(DurableStore(lived).journal.entries) == 5
    assert {int(path.name.split("-")[0]) for path in (lived / "frames").iterdir()} == set(range(5, 10))


def test_frames_that_cannot_be_deleted_stop_nobody(history, tmp_path):
    class Sticky(Disk):
        def remove(self, path):
            if path.parent.name == "frames" and path.exists():
                raise PermissionError(13, "Permission denied")
            super().remove(path)

    life = lived_in(history, tmp_path, Sticky())
    life.go_on(ROUNDS)
    life.close()
    assert len(list((tmp_path / "frames").iterdir())) == 2 * ROUNDS
    assert found_in(history, tmp_path).round == ROUNDS


def test_commits_that_came_while_a_checkpoint_was_written_are_kept(history, tmp_path):
    life = lived_in(history, tmp_path, checkpoint_every=100)
    life.save()
    for _ in range(4):
        head, tensors = life.head, life.replica.shared_tensors()
        life.one_round()
        life.one_round()
        life.store.save(head, tensors, {})  # of a moment two rounds ago
    life.close()
    for folder in sorted((tmp_path / "checkpoints").iterdir())[1:]:
        damage(folder / "tensors.safetensors")
    assert (found_in(history, tmp_path).checkpoint, found_in(history, tmp_path).round) == (2, 8)


def test_a_peer_killed_whenever_it_writes_a_checkpoint_loses_no_commit(history, tmp_path):
    first = lived_in(history, tmp_path)
    first.save()
    first.close()
    for last in range(1, ROUNDS + 1):
        life = lived_in(history, tmp_path)
        life.save = lambda: None
        life.one_round()
        life.close()
        assert found_in(history, tmp_path).round == last


def test_what_a_crash_left_among_the_frames_is_swept_and_stops_nothing(history, lived):
    leftover = lived / "frames" / ".tmp-000000000009-abcdef"
    leftover.write_bytes(b"half a fra")
    (lived / "frames" / "notes-of-mine").write_text("not a frame")
    life = lived_in(history, lived)
    assert not leftover.exists()
    leftover.write_bytes(b"half")  # a write under way on another thread
    for _ in range(3):
        life.save()
    assert (life.head.round, life.replica.digest) == (ROUNDS, history.heads[ROUNDS].anchor)


def test_a_commit_whose_frame_is_damaged_ends_the_replay_before_it(history, lived):
    (broken, *_) = (lived / "frames").glob("000000000009-*")
    damage(broken)
    found = found_in(history, lived)
    assert (found.round, found.equal) == (8, True)


def test_the_last_vote_is_known_without_a_checkpoint_unless_it_was_in_another_run(history, tmp_path):
    store, record = DurableStore(tmp_path), history.commits[4].record
    assert store.last_vote(RUN) is None
    for run, binds in ((RUN, True), (b"\x01" * 32, False)):
        voted = Acceptor(record.round, 1, 1, replace(record, run=run))
        store.acceptor.write(voted.to_bytes())
        assert store.last_vote(RUN) == (voted if binds else None)
    store.close()


def test_commits_of_a_branch_that_was_given_up_do_not_hide_those_after_it(history, tmp_path):
    life = lived_in(history, tmp_path)
    life.save()
    other = record_after(replace(history.heads[0], hash=bytes(32)))
    life.store.append(Commit(other, history.commits[0].certificate), [])
    life.go_on(3)
    life.close()
    found = found_in(history, tmp_path)
    assert (found.round, found.equal) == (3, True)


def test_a_vote_ahead_of_the_journal_and_one_behind_it_are_both_kept(history, tmp_path):
    life = lived_in(history, tmp_path)
    life.go_on(4)
    behind = life.store.acceptor.path.read_bytes()
    life.vote(5)
    ahead = life.store.acceptor.path.read_bytes()
    life.close()
    assert (found_in(history, tmp_path).voted.round, found_in(history, tmp_path).round) == (5, 4)
    life.store.acceptor.path.write_bytes(behind)
    assert (found_in(history, tmp_path).voted.round, found_in(history, tmp_path).round) == (4, 4)
    assert behind != ahead


def test_a_debt_that_a_replayed_commit_paid_is_not_sent_again(history, lived):
    """The feedback after a commit dies with the process; the checkpoint's is older than what its frame sent."""
    life = lived_in(history, lived)
    found = life.store.load(RUN)
    replica = history.replica()
    replica.load(found.tensors)
    replica.feedback[0] = {"debt": torch.ones(16)}
    untouched = replica.feedback[0]["debt"].clone()
    life.store.replay(found.head, replica, b"\0" * 32)
    assert torch.equal(replica.feedback[0]["debt"], untouched), "a commit that names others leaves our debt whole"
    replica.load(found.tensors)
    replica.feedback[0] = {"debt": torch.ones(16)}
    _, named = life.store.replay(found.head, replica, ME)
    assert named
    assert not replica.feedback[0]["debt"].any(), "every entry was sent, so nothing is owed that we know of"


def test_frames_are_written_with_the_vote_once_and_found_again_if_they_are_whole(tmp_path):
    store = DurableStore(tmp_path)
    frames = [
        seal(header_after(START, FrameKind.CONTRIBUTION, 0, signer_of(n).peer), b"body", signer_of(n)) for n in (0, 1)
    ]
    refs = tuple(sorted((ref(f.header.sender, f.hash) for f in frames), key=lambda one: one.peer))
    voted = replace(record(START, {}), frames=refs)
    data = {f.hash: f.data for f in frames}
    store.frames.keep(voted, [data[one.frame] for one in refs])
    acceptor = Acceptor(1, 0, 0, voted)
    assert {f.hash for f in store.past(START, acceptor).frames} == set(data)
    (file,) = (
        path for path in (tmp_path / "frames").iterdir() if refs[0].frame.hex().startswith(path.name.split("-")[1])
    )
    damage(file)
    assert [f.hash for f in store.past(START, acceptor).frames] == [refs[1].frame]
    assert store.past(START, None).frames == ()
    with pytest.raises(PayloadError):
        store.frames.read(1, refs[0].frame)
    store.close()


def test_a_restarted_peer_knows_the_way_to_its_head_as_far_as_its_disk_goes(history, lived):
    store = DurableStore(lived)
    past = store.past(history.heads[ROUNDS], None)
    oldest = past.heads[0].round
    assert oldest == 4, "the oldest checkpoint that is kept"
    assert [head.hash for head in past.heads] == [head.hash for head in history.heads[oldest:]]
    assert past.heads[-1] == history.heads[ROUNDS]
    assert list(past.commits[-5:]) == history.commits[-5:]
    assert [frame.data for frame in past.frames[-2:]] == history.frames[-1]
    store.close()


def missed(history: History, tmp_path: Path) -> tuple[Life, Life]:
    """A peer that slept from round 2 on with progress and debt of its own, and one that is at round 7."""
    behind, ahead = (lived_in(history, tmp_path / name) for name in ("behind", "ahead"))
    behind.go_on(2)
    debt = {"feedback/0/debt": torch.ones_like(behind.replica.anchors[0])}
    behind.store.save(behind.head, {**behind.replica.shared_tensors(), **debt}, {})
    ahead.go_on(7)
    return behind, ahead


def test_a_peer_that_adopted_a_snapshot_wakes_up_there_and_at_the_commits_after_it(history, tmp_path):
    behind, ahead = missed(history, tmp_path)
    behind.store.adopt(ahead.head, ahead.replica.shared_tensors())
    behind.store.append(history.commits[7], history.frames[7])
    behind.close()
    found = DurableStore(tmp_path / "behind").load(RUN)
    assert found.adopted
    assert "feedback/0/debt" not in found.tensors, "the rounds in between may have taken it"
    assert (found_in(history, tmp_path / "behind").round, found_in(history, tmp_path / "behind").equal) == (8, True)


def test_a_gossiping_peer_that_adopted_a_head_wakes_up_there_with_its_own_replica_and_debt(history, tmp_path):
    behind, ahead = missed(history, tmp_path)
    before = behind.store.load(RUN).tensors
    behind.store.adopt(ahead.head, {})
    behind.close()
    found = DurableStore(tmp_path / "behind").load(RUN)
    assert found.head == ahead.head
    assert not found.adopted, "its live model is as old as its replica"
    assert set(found.tensors) == set(before)


def test_the_next_checkpoint_replaces_what_was_adopted(history, tmp_path):
    behind, ahead = missed(history, tmp_path)
    behind.store.adopt(ahead.head, ahead.replica.shared_tensors())
    behind.store.save(behind.head, behind.replica.shared_tensors(), {})  # begun before
    assert DurableStore(tmp_path / "behind").load(RUN).adopted
    behind.store.save(ahead.head, ahead.replica.shared_tensors(), {})
    assert not behind.store.adopted.exists()
    assert not DurableStore(tmp_path / "behind").load(RUN).adopted


def test_a_damaged_snapshot_is_passed_over(history, tmp_path):
    behind, ahead = missed(history, tmp_path)
    behind.store.adopt(ahead.head, ahead.replica.shared_tensors())
    damage(next(behind.store.adopted.glob("*/tensors.safetensors")))
    found = DurableStore(tmp_path / "behind").load(RUN)
    assert (found.adopted, found.head) == (False, behind.head)


def test_results_that_an_earlier_life_made_leave_nothing_to_owe(history, tmp_path):
    """What they lost died with that life; what was owed before may be in them."""
    start, (me, other) = history.heads[0], SIGNERS
    headers = [header_after(start, FrameKind.RESULT, 0, signer.peer, part, 2) for part, signer in enumerate(SIGNERS)]
    frames = [seal(header, history.replica().codec.encode(torch.ones(8), {}, ((8,),)).body, signer)
              for header, signer in zip(headers, SIGNERS, strict=True)]  # fmt: skip
    refs = tuple(FrameRef(frame.header.sender, frame.hash, part, 1, 1) for part, frame in enumerate(frames))
    reduced = replace(
        record_after(start, frames=refs),
        contributors=(FrameRef(other.peer, bytes(32), 0, 1, 1),),
        partition=((me.peer, 0, 8), (other.peer, 8, 16)),
    )
    store, replica = DurableStore(tmp_path), history.replica()
    store.append(replace(history.commits[0], record=reduced), [frame.data for frame in frames])
    replica.feedback[0] = {OWED: torch.ones(16)}
    head, named = store.replay(start, replica, ME)
    assert (head.round, named) == (1, False)
    assert replica.owed_as_owner(0).tolist() == [0.0] * 8 + [1.0] * 8
    store.close()


def owing(history: History) -> dict[str, torch.Tensor]:
    return {**history.replica().shared_tensors(), "feedback/0/debt": torch.ones(16)}


def owes(folder: Path, disk: Disk = DISK) -> bool:
    """Whether a peer that starts there has a debt."""
    store = DurableStore(folder, disk=disk)
    found = store.load(RUN)
    store.close()
    assert found is not None
    return "feedback/0/debt" in found.tensors


@pytest.mark.parametrize("seed", range(12))
def test_a_debt_that_was_saved_since_is_owed_after_a_power_cut_in_any_state(seed, history, tmp_path):
    """Of a swap that is booked the note came back, whose removal was never made durable, and took the debt with it."""
    disk = RecordingDisk(tmp_path)
    store = DurableStore(tmp_path, disk=disk)
    store.save(history.heads[0], owing(history), {"gossip_step": 3})
    store.ledger().swap_begins()
    store.save(history.heads[1], owing(history), {"gossip_step": 4})
    store.close()
    disk.crash(random.Random(seed))
    assert owes(tmp_path, disk)


def test_a_debt_that_a_partner_may_have_been_given_is_not_owed_again_after_a_crash(history, tmp_path):
    store = DurableStore(tmp_path)
    store.save(history.heads[0], owing(history), {"gossip_step": 3})
    assert owes(tmp_path)
    store.ledger().swap_begins()
    store.ledger().swap_begins()
    assert not owes(tmp_path)
    store.save(history.heads[1], owing(history), {"gossip_step": 4})
    assert owes(tmp_path)
    taken = store.swaps
    store.ledger().swap_begins()
    store.save(history.heads[2], owing(history), {"gossip_step": 5}, swaps=taken)
    assert not owes(tmp_path), "it was swapped while the checkpoint was written"
    store.save(history.heads[3], owing(history), {"gossip_step": 6}, swaps=store.swaps)
    assert owes(tmp_path)
    damage(sorted((tmp_path / "checkpoints").iterdir())[-1] / "tensors.safetensors")
    assert not owes(tmp_path), "step 5 was swapped since"
    store.close()


def test_a_snapshot_that_was_adopted_while_a_checkpoint_was_written_stays(history, tmp_path):
    store, tensors = DurableStore(tmp_path), history.replica().shared_tensors()
    for head in history.heads[:2]:
        store.adopt(head, tensors)
    store.save(history.heads[0], tensors, {})
    assert DurableStore(tmp_path).load(RUN).head == history.heads[1]
    store.save(history.heads[1], tensors, {})
    assert not (tmp_path / "adopted").exists()
    store.close()
