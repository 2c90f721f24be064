"""Journals are read as the peers write them, whatever state a kill left them in."""

from __future__ import annotations

import json

import pytest
import torch

from decentral.state.checkpoint import load_newest, save
from decentral.state.journal import Journal
from decentral.swarm.identity import Identity
from tests.chaos.evidence import Evidence, journal_entries
from tests.chaos.subject import Subject
from tests.chaos.trend import trend


@pytest.fixture
def path(tmp_path):
    with Journal(tmp_path / "journal") as journal:
        for number in range(5):
            journal.append(bytes([number]) * 100)
    return tmp_path / "journal"


def test_every_whole_entry_is_read_and_nothing_after_a_torn_one(path):
    data = path.read_bytes()
    assert [body[0] for _, body in journal_entries(data)] == [0, 1, 2, 3, 4]
    assert [body[0] for _, body in journal_entries(data[:-1])] == [0, 1, 2, 3]
    damaged = bytearray(data)
    damaged[150] ^= 1
    assert [body[0] for _, body in journal_entries(bytes(damaged))] == [0]


def test_an_entry_that_is_no_commit_is_evidence_too(path):
    evidence = Evidence()
    evidence.read_journal("peer3", path)
    assert evidence.records[-1]


def test_events_of_all_incarnations_are_taken(tmp_path):
    rows = [
        {"event": "joined", "mono": 1.0, "at": 0, "record": "r0"},
        {"event": "commit", "mono": 2.0, "round": 1, "record": "r1", "anchor": "a1"},
        {"event": "joined", "mono": 3.0, "at": 1, "record": "r1"},
        {"event": "resynced", "mono": 4.0, "round": 9, "record": "r9", "anchor": "a9"},
    ]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "events.jsonl").write_text("\n".join([*lines[:2], '{"torn', *lines[2:]]) + "\n")
    evidence = Evidence()
    evidence.read_events("peer1", tmp_path)
    assert set(evidence.records) == {1, 9}
    assert evidence.anchors == {"r1": {"a1": {"peer1"}}, "r9": {"a9": {"peer1"}}}
    assert len(evidence.events["peer1"]) == 4


def test_a_common_slope_is_found_below_different_levels():
    series = {n: [(float(t), 100.0 * n + t / 3600) for t in range(0, 600, 5)] for n in range(3)}
    found = trend(series, skip=60, least=60)
    assert found is not None
    assert found.per_hour == pytest.approx(1.0)
    assert found.processes == 3


def test_processes_that_did_not_live_long_enough_say_nothing():
    assert trend({1: [(float(t), 1.0) for t in range(0, 100, 5)]}, skip=60, least=60) is None


# ---- a subject is left what it needs to come back ----


def test_a_checkpoint_is_corrupted_only_while_another_whole_one_is_left(tmp_path):
    for round_ in range(3):
        save(tmp_path / "checkpoints", f"round-{round_:06d}", {"live/0": torch.full((8,), float(round_))}, {})
    subject = Subject(
        0, tmp_path, Identity.load_or_create(tmp_path / "identity.key"), 4001, founder=True, small_disk=False
    )
    assert [subject.corrupt_checkpoint() for _ in range(4)] == [True, True, False, False]
    assert load_newest(tmp_path / "checkpoints").tensors["live/0"][0] == 0.0
