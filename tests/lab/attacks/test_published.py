"""Attacks against what a published library sends; ``tests/golden/made_by/attacks.py`` makes the vectors again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decentral.lab.attacks import (
    FIRST_STEP,
    Rule,
    alike,
    distance_from_honest,
    line_search,
    make_attack,
    reversal,
    shift,
)
from tests.lab.attacks.rules import tried, trusting

GOLDEN = json.loads((Path(__file__).parents[2] / "golden/attacks.json").read_text(encoding="utf-8"))
CASES = pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["kind"])


@CASES
def test_fixed_attacks_send_what_byzfl_sends(case: dict[str, Any]):
    honest_KN = torch.tensor(case["vectors"], dtype=torch.float64)
    for name, wanted in case["results"].items():
        if " " in name:
            continue  # below
        found_FN = make_attack(name).changes(honest_KN, case["f"], trusting, torch.Generator())
        np.testing.assert_allclose(found_FN, [wanted] * case["f"], rtol=1e-9, atol=1e-12, err_msg=name)


@CASES
def test_the_line_search_finds_what_byzfl_finds_on_each_side_and_for_each_rule(case: dict[str, Any]):
    honest_KN = torch.tensor(case["vectors"], dtype=torch.float64)
    for name, wanted in case["results"].items():
        if " " not in name:
            continue  # above
        attack, side, rule = name.split()
        from_N, along_N = {"alie": shift, "ipm": reversal}[attack](honest_KN)
        factor = searched(honest_KN, case["f"], tried(rule, case["f"]), from_N, along_N, int(side))
        np.testing.assert_allclose(from_N + along_N * factor, wanted, rtol=1e-6, atol=1e-6, err_msg=name)


def searched(honest_KN: Tensor, f: int, rule: Rule, from_N: Tensor, along_N: Tensor, side: int) -> float:
    def distance(factor: float) -> float:
        return distance_from_honest(honest_KN, alike(from_N + along_N * factor, f), rule)

    return line_search(distance, side * FIRST_STEP)[0]
