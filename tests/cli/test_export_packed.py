"""``decentral export``, packed and back."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from click.testing import Result

from decentral.parameters import gather, schema_of
from decentral.state.checkpoint import save
from decentral.state.snapshot import anchor_name

Run = Callable[..., Result]


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
