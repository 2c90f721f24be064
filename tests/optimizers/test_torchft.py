"""The anchors and live parameters that torchft's DiLoCo class makes of the same inner steps, to 1e-6.

Source of the vectors: torchft 0.2.0, ``torchft.local_sgd.DiLoCo`` with torch's SGD(0.7, momentum 0.9,
Nesterov) outside; ``tests/golden/made_by/torchft_diloco.py`` makes them again.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from decentral.optimizers import make_outer
from tests.kit.stepping import step_of

VECTORS = load_file(Path(__file__).parents[1] / "golden/torchft_diloco.safetensors")
REPLICAS, ROUNDS = 2, 6


@pytest.mark.parametrize(
    ("case", "name", "hyper"),
    [("diloco", "diloco", {}), ("streaming", "streaming", {"alpha": 0.5})],
    ids=["DiLoCo", "Streaming DiLoCo"],
)
def test_rounds_end_where_torchft_ends_them(case: str, name: str, hyper: dict[str, float]):
    method = make_outer(name, {"lr": 0.7, "momentum": 0.9, **hyper})
    fragments = sum(key.startswith(f"{case}/start/") for key in VECTORS)
    anchors = [VECTORS[f"{case}/start/{f}"] for f in range(fragments)]
    states = [method.init(anchor) for anchor in anchors]
    for number in range(ROUNDS * fragments):
        f, told = number % fragments, f"{case}/{number}"
        sent = [VECTORS[f"{told}/sent/{n}"] for n in range(REPLICAS)]
        changes = [method.contribute(anchors[f], one) for one in sent]
        anchors[f], states[f] = step_of(method, anchors[f], changes, states[f], number // fragments)
        for n in range(REPLICAS):
            live = method.merge(VECTORS[f"{told}/live/{n}"], sent[n], anchors[f])
            torch.testing.assert_close(live, VECTORS[f"{told}/merged/{n}"], rtol=0, atol=1e-6)
