"""A subject's faults leave it what it needs to come back."""

from __future__ import annotations

import torch

from decentral.state.checkpoint import load_newest, save
from decentral.swarm.identity import Identity
from tests.chaos.subject import Subject


def test_a_checkpoint_is_corrupted_only_while_another_whole_one_is_left(tmp_path):
    for round_ in range(3):
        save(tmp_path / "checkpoints", f"round-{round_:06d}", {"live/0": torch.full((8,), float(round_))}, {})
    subject = Subject(
        0, tmp_path, Identity.load_or_create(tmp_path / "identity.key"), 4001, founder=True, small_disk=False
    )
    assert [subject.corrupt_checkpoint() for _ in range(4)] == [True, True, False, False]
    assert load_newest(tmp_path / "checkpoints").tensors["live/0"][0] == 0.0
