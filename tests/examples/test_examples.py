"""Every example of the folder, in a swarm of two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import load_file

from tests.examples.two_peers import FirstPeers, first_peers


@pytest.fixture(scope="module")
def first() -> Iterator[FirstPeers]:
    with first_peers() as process:
        yield process


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")  # a Trainer without a GPU
def test_two_trainers_end_with_the_same_model(first, tmp_path):
    one, other = first.swarm_of_two("trainer.py", tmp_path, "--rounds", "3")
    assert one.anchor_digest == other.anchor_digest != ""
    assert [one.round, other.round] == [3, 3]
    assert other.rounds_contributed > 0
    models = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("first", "second")]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
