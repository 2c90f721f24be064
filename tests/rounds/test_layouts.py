"""Which tensors a snapshot has, where receivers remember: by the local model and a donor's word, which is bounded."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch

from decentral.consensus.chain import Head
from decentral.errors import PayloadError
from decentral.parameters.schema import MAX_FRAGMENTS
from decentral.rounds.snapshots import Layouts
from decentral.state.snapshot import Layout, Snapshot, SnapshotIndex
from decentral.wire.messages import MAX_PEERS
from tests.consensus.test_history import START
from tests.replica.test_senders import replica_of

MEMBERS = tuple(bytes([n]) * 32 for n in range(5))
HEAD = replace(START, members=MEMBERS)


def donor_of(*senders: int):
    replica = replica_of()
    replica.senders.book(0, {MEMBERS[n]: {"sent": torch.full((16,), float(n))} for n in senders})
    return replica


@pytest.mark.parametrize("senders", [(), (0,), (4,), (0, 2, 4), (0, 1, 2, 3, 4)])
def test_a_joiner_sizes_a_snapshot_by_what_its_index_says_of_senders(senders):
    donor = donor_of(*senders)
    made = Snapshot(donor.shared_tensors(), Layouts(donor).document(MEMBERS))
    data, joiner = made.index.to_bytes(), Layouts(replica_of())
    layout = joiner.of(SnapshotIndex.document(data), HEAD)
    assert layout == Layout.of(donor.shared_tensors())
    assert SnapshotIndex.from_bytes(data, layout).hashes == made.index.hashes
    assert len(data) <= joiner.longest_index


@pytest.mark.parametrize(
    "told",
    [
        None,
        {},
        "1f",
        [],
        ["1", "1"],
        [1],
        [""],
        ["20"],
        ["01"],
        ["1F"],
        ["-1"],
        [" 1"],
        ["0x1"],
        ["1_0"],
        ["f" * 64],
        [[]],
    ],
    ids=repr,
)
def test_what_an_index_says_of_senders_in_any_other_way_is_refused(told):
    with pytest.raises(PayloadError, match="use another donor"):
        Layouts(replica_of()).of({} if told is None else {"senders": told}, HEAD)


def test_a_snapshot_of_more_members_than_fit_into_memory_is_refused_before_room_is_made(monkeypatch):
    memory = SimpleNamespace(total=8 * 16 * 8)  # anchor, momentum and six senders, twice
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    many = replace(START, members=tuple(bytes([n]) * 32 for n in range(7)))
    layouts = Layouts(replica_of())
    assert layouts.of({"senders": ["3f"]}, many).nbytes == 4 * 16 * 8
    with pytest.raises(PayloadError, match="this machine cannot hold 2 copies"):
        layouts.of({"senders": ["7f"]}, many)


@pytest.mark.parametrize("feedback", ["ef21", "none"])
def test_the_largest_run_there_may_be_can_be_joined(feedback):
    """Its donors raised ConfigError: the document had room for 480 members and 240 fragments of ef21."""
    members = tuple(n.to_bytes(32, "big") for n in range(MAX_PEERS))
    most = 2**63 - 1
    counts = {"epoch": most, "round": most, "outer_step": most, "tokens": most, "contributions": most}
    head = replace(START, members=members, newcomers=frozenset(members), **counts)
    replica = replica_of(feedback, fragments=MAX_FRAGMENTS)
    kept = {peer: {"sent": torch.zeros(16)} for peer in members}
    for fragment in range(MAX_FRAGMENTS if feedback == "ef21" else 0):
        replica.senders.book(fragment, kept)
    layouts = Layouts(replica)
    made = Snapshot({"anchor/0": torch.zeros(1)}, {"head": head.to_dict(), **layouts.document(members)}).index
    found = SnapshotIndex.document(made.to_bytes())
    assert Head.from_dict(found["head"]) == head
    assert len(made.to_bytes()) <= layouts.longest_index
    if feedback == "ef21":
        assert set(found["senders"]) == {"f" * (MAX_PEERS // 4)}


def test_where_receivers_keep_nothing_a_snapshot_is_what_it_was():
    layouts, replica = Layouts(replica_of("none")), replica_of("none")
    assert layouts.document(MEMBERS) == {}
    assert layouts.of({"senders": ["1f"]}, HEAD) == Layout.of(replica.shared_tensors())
    assert layouts.longest_index == SnapshotIndex.max_nbytes(layouts.least)


def test_an_index_that_ends_inside_its_document_is_refused():
    data = Snapshot(replica_of().shared_tensors(), {"senders": ["0"]}).index.to_bytes()
    for nbytes in (0, 20, 47, 60):
        with pytest.raises(PayloadError):
            SnapshotIndex.document(data[:nbytes])
