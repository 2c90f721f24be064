"""A folder of anchors: whole files only, the newest K, and deltas that lead from one to the next."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from decentral.errors import DiskError
from decentral.state.delta import AnchorFolder, apply_delta
from decentral.state.durable import Disk


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(40, 30, generator=generator), "count": torch.tensor(seed)}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_newest_k_are_kept_and_latest_names_the_newest(tmp_path: Path) -> None:
    anchors = AnchorFolder(tmp_path / "anchors", 2, wall=lambda: 1234.5678)
    for round_ in (3, 6, 9):
        anchors.write(round_, f"{round_:02x}" * 32, tensors(round_), {"final": round_ == 9})
    assert names(anchors.folder) == {"round-000006.safetensors", "round-000009.safetensors", "latest.json"}
    found = json.loads((anchors.folder / "latest.json").read_text())
    wanted = {"version": 1, "round": 9, "digest": "09" * 32, "file": "round-000009.safetensors", "delta": None}
    assert found == wanted | {"time": 1234.568, "final": True}
    assert anchors.latest() == found
    loaded = load_file(anchors.folder / found["file"])
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors(9).items())


def test_a_delta_leads_from_each_anchor_to_the_next_to_the_bit(tmp_path: Path) -> None:
    anchors = AnchorFolder(tmp_path, 3, deltas=True)
    before = tensors(0)
    anchors.write(1, "", before, {})
    after = {"w": before["w"].clone(), "count": torch.tensor(7)}
    after["w"][3, :2] += 1.0
    anchors.write(2, "", after, {})
    found = anchors.latest()
    assert found is not None
    assert found["delta"] == {"file": "round-000002.delta", "since": 1}
    message = (tmp_path / "round-000002.delta").read_bytes()
    assert len(message) < 400, "of 4,808 bytes"
    there = apply_delta(load_file(tmp_path / "round-000001.safetensors"), message)
    assert all(torch.equal(there[name], tensor) for name, tensor in after.items())
    for round_ in (3, 4, 5):
        anchors.write(round_, "", tensors(round_), {})
    assert not {"round-000001.safetensors", "round-000002.delta"} & names(tmp_path)


def test_rounds_of_a_branch_that_was_given_up_go(tmp_path: Path) -> None:
    anchors = AnchorFolder(tmp_path, 3)
    for round_ in (7, 8, 9, 8):
        anchors.write(round_, f"{round_}", tensors(round_), {})
    assert names(tmp_path) == {"round-000007.safetensors", "round-000008.safetensors", "latest.json"}


class FullDisk(Disk):
    def sync_folder(self, path: Path) -> None:
        raise OSError(28, "No space left on device")


def test_on_a_full_disk_what_was_there_stays_and_is_still_the_latest(tmp_path: Path) -> None:
    AnchorFolder(tmp_path, 1).write(1, "a", tensors(1), {})
    with pytest.raises(DiskError, match="No space left"):
        AnchorFolder(tmp_path, 1, disk=FullDisk()).write(2, "b", tensors(2), {})
    found = AnchorFolder(tmp_path, 1).latest()
    assert found is not None
    assert found["round"] == 1
    AnchorFolder(tmp_path, 1).write(3, "c", tensors(3), {})
    assert names(tmp_path) == {"round-000003.safetensors", "latest.json"}


@pytest.mark.parametrize("text", ["", "{", "[1]", "{}", '{"file": 3}', '{"file": "gone.safetensors"}'])
def test_a_latest_that_leads_nowhere_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "latest.json").write_text(text)
    assert AnchorFolder(tmp_path, 1).latest() is None
