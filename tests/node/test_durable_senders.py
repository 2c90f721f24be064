"""What a restart makes of what was kept of senders: the journal and a snapshot lead to what the others hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from decentral.compressors import parse_compressor, parse_feedback
from decentral.consensus.chain import Head
from decentral.node.durable_store import DurableStore
from decentral.optimizers.diloco import DiLoCo
from decentral.parameters import schema_of
from decentral.replica.apply import outer_step
from decentral.replica.codec import Codec
from decentral.replica.contents import sender_name
from decentral.replica.contribution import encode_whole, header_after
from decentral.replica.replica import Replica
from decentral.wire.frames import FrameKind, seal
from decentral.wire.messages import Certificate, Commit, FrameRef
from tests.kit.history import ME, RUN, SIGNERS
from tests.kit.liars import record_after

Tensors = dict[str, torch.Tensor]
OTHER = SIGNERS[1].peer
NUMEL = 256
OF_OTHER = sender_name(0, OTHER, "sent")


def replica_of() -> Replica:
    codec = Codec(parse_compressor("topk(k=32, chunk=256)"), parse_feedback("econtrol(eta=0.01)"))
    schema = schema_of(torch.nn.Linear(16, 16, bias=False), 1)
    return Replica(schema, [torch.zeros(NUMEL)], DiLoCo(lr=0.7, momentum=0.9), codec, codec)


class Run:
    """Two peers' chain: where it stands, and what both hold, after each round."""

    def __init__(self, folder: Path) -> None:
        self.replica, self.store = replica_of(), DurableStore(folder)
        genesis = Head.genesis(RUN, self.replica.schema.digest, self.replica.digest, ME)
        self.heads = [replace(genesis, members=(ME, OTHER))]
        self.held: list[Tensors] = [dict(self.replica.shared_tensors())]

    def round(self, contributors: tuple[int, ...], next_members: tuple[bytes, ...]) -> None:
        head, frames = self.heads[-1], []
        for n in contributors:
            gradient = torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * head.round + n))
            made = encode_whole(self.replica, 0, gradient, me=SIGNERS[n].peer)
            header = header_after(head, FrameKind.CONTRIBUTION, 0, SIGNERS[n].peer, steps=1, tokens=1)
            frames.append(seal(header, made.body, SIGNERS[n]))
        refs = tuple(FrameRef(frame.header.sender, frame.hash, 0, 1, 1) for frame in frames)
        record = replace(record_after(head, frames=refs), next_members=next_members)
        self.store.append(Commit(record, Certificate(0, ())), [frame.data for frame in frames])
        self.replica.install(outer_step(self.replica, record, {frame.hash: frame for frame in frames}))
        self.replica.senders.keep_only(next_members)
        self.heads.append(replace(head.extended(record), anchor=self.replica.digest))
        self.held.append(dict(self.replica.shared_tensors()))


def lived(folder: Path) -> Run:
    """The other contributes, leaves, is let in again, and contributes: a round each."""
    run = Run(folder)
    run.round((0, 1), (ME, OTHER))
    run.round((0,), (ME,))
    run.round((0,), (ME, OTHER))
    run.round((0, 1), (ME, OTHER))
    return run


def check(found: Replica, held: Tensors) -> None:
    assert set(found.shared_tensors()) == set(held)
    assert all(torch.equal(tensor, held[name]) for name, tensor in found.shared_tensors().items())


def test_the_journal_leads_to_what_the_others_keep_of_who_left_and_came_back(tmp_path: Path) -> None:
    run = lived(tmp_path)
    assert [OF_OTHER in held for held in run.held] == [False, True, False, False, True]
    for begun in range(len(run.heads)):
        replica = replica_of()
        replica.load(run.held[begun])
        head, _ = run.store.replay(run.heads[begun], replica, ME)
        assert head == run.heads[-1]
        check(replica, run.held[-1])
    run.store.close()


def test_a_snapshot_replaces_what_the_checkpoint_before_it_kept_of_who_left(tmp_path: Path) -> None:
    run = lived(tmp_path)
    mine = {"live/0": torch.ones(NUMEL), "feedback/0/debt": torch.ones(NUMEL)}
    run.store.save(run.heads[1], {**run.held[1], **mine}, {})
    run.store.adopt(run.heads[3], run.held[3])
    found = run.store.load(RUN)
    assert found is not None
    assert found.adopted
    assert "live/0" in found.tensors
    replica = replica_of()
    replica.load(found.tensors)
    check(replica, run.held[3])
    run.store.replay(found.head, replica, ME)
    check(replica, run.held[4])
    run.store.close()


def test_a_commit_of_a_lost_process_may_have_taken_all_that_was_owed(tmp_path: Path) -> None:
    """What it added has a value wherever this peer ever sent one, so nothing of the progress behind it is known."""
    run = lived(tmp_path)
    replica = replica_of()
    replica.load({**run.held[3], "feedback/0/debt": torch.ones(NUMEL)})
    assert "debt" in replica.feedback[0]
    _, named = run.store.replay(run.heads[3], replica, ME)
    assert named
    assert replica.feedback == [{}]
    check(replica, run.held[4])
    run.store.close()
