"""``decentral export``, packed and back."""

import json
from pathlib import Path

import torch

from decentral.parameters import gather, schema_of
from decentral.state.checkpoint import save
from decentral.state.export import export, unpack
from decentral.state.snapshot import anchor_name
from tests.cli.conftest import Run


def test_a_packed_model_is_unpacked_by_the_same_command(run: Run, tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 4)
    schema = schema_of(model, 1)
    anchor = gather(dict(model.named_parameters()), schema.fragments[0])
    save(tmp_path / "run" / "checkpoints", "round-1", {anchor_name(0): anchor}, {"parameters": schema.to_json()})
    assert run("export", "run", "--to", "plain").exit_code == 0
    told = run("export", "run", "--to", "packed", "--packed")
    assert "open it with decentral export packed --to FOLDER" in told.stdout
    unpacked = run("export", "packed", "--to", "model", "--json")
    assert json.loads(unpacked.stdout) == {"packed": "packed", "to": "model"}
    name = "model.safetensors"
    assert (tmp_path / "model" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    again = run("export", "packed", "--to", "model")
    assert again.exit_code == 2
    assert "model exists and is not an empty folder" in again.stderr


def test_an_export_tells_how_far_it_is_and_ends_at_the_whole(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(40, 50) for _ in range(6)))
    schema = schema_of(model, 1)
    anchor = gather(dict(model.named_parameters()), schema.fragments[0])
    save(tmp_path / "run" / "checkpoints", "round-1", {anchor_name(0): anchor}, {"parameters": schema.to_json()})
    for to, given in (("plain", {}), ("packed", {"packed": True})):
        shares: list[float] = []
        export(tmp_path / "run" / "checkpoints", tmp_path / to, on_share=shares.append, **given)
        assert len(shares) > 5
        assert 0.99 < max(shares) == shares[-1] <= 1.0  # the file's header is read, and not told
    shares = []
    unpack(tmp_path / "packed", tmp_path / "model", shares.append)
    assert 0.8 < shares[-1] <= 1.0, "how small it was packed is a guess"
