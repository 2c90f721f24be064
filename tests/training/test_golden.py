"""Twelve steps of the authors' own code, to 1e-6; where the numbers came from is beside them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decentral.training.inner_optimizers import ADOPT, GPA, Averaging, ScheduleFree

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/inner_optimizers.json").read_text(encoding="utf-8"))
PROBLEM = {name: torch.tensor(GOLDEN["problem"][name]) for name in ("start", "curvature", "target")}

MAKERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "schedule_free": lambda held: ScheduleFree(held, beta2=0.95, weight_decay=0.1),
    "gpa": lambda held: GPA(held, betas=(0.9, 0.95), averaging=0.9),
    "adopt": lambda held: ADOPT(held, betas=(0.9, 0.99), weight_decay=0.1),
}


def gradient_at(parameter: Tensor) -> Tensor:
    return PROBLEM["curvature"] * (parameter.detach() - PROBLEM["target"])


@pytest.mark.parametrize("name", sorted(GOLDEN["cases"]))
def test_it_steps_as_its_authors_code_does(name: str):
    case, problem = GOLDEN["cases"][name], GOLDEN["problem"]
    parameter = torch.nn.Parameter(PROBLEM["start"].clone())
    optimizer = MAKERS[name]([parameter])
    trained, learnt = [], []
    for number in range(len(case["trained"])):
        for group in optimizer.param_groups:
            group["lr"] = problem["rate"] * min(1.0, (number + 1) / problem["warmup"])
        parameter.grad = gradient_at(parameter)
        optimizer.step()
        trained.append(parameter.detach().clone())
        if isinstance(optimizer, Averaging):
            optimizer.eval()
            learnt.append(parameter.detach().clone())
            optimizer.train()
    torch.testing.assert_close(torch.stack(trained), torch.tensor(case["trained"]), rtol=1e-6, atol=1e-6)
    if learnt:
        torch.testing.assert_close(torch.stack(learnt), torch.tensor(case["learnt"]), rtol=1e-6, atol=1e-6)
