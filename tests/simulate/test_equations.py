"""The equations that simulated runs are judged by, and the methods that they are written apart from, agree."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from decentral.manifest import preset_manifest
from decentral.optimizers import Contributor, OuterMethod, RoundInfo, make_outer
from decentral.simulate.equations import EQUATIONS, WEIGH, Averaged
from decentral.wire.messages import FrameRef
from tests.kit.stepping import step
from tests.kit.tables import ALONG_DIRECTIONS

REFS = tuple(FrameRef(bytes([n]) * 32, bytes(32), 0, 1, 1) for n in range(3))
SAY = {"partial_updates"}  # methods whose contributors say what they trained: tests/laws/test_mass.py
SPELLED: list[tuple[str, dict[str, float | str]]] = [
    *((name, {}) for name in sorted(set(EQUATIONS) - WEIGH - SAY - set(ALONG_DIRECTIONS))),
    ("demo_sgd", {}),
    ("demo_sgd", {"step": "mean", "lr": 0.5}),
    ("decoupled", {"mean": "plain"}),
    ("fedopt", {"variant": "yogi"}),
    ("fedopt", {"variant": "adagrad"}),
    ("co2", {"penalty": 2.0, "bound": 0.05}),
    ("delayed", {"late": 0}),
    ("diloco", {"restart": 3}),
    ("sparta", {"whole": 3}),
    ("sparta", {"whole": 0}),
    ("pier", {"rise": 2, "decay_from": 4, "decay_over": 3}),
    ("pier", {"rise": 0, "decay_from": 0, "decay_over": 0}),
]


@pytest.mark.parametrize(("name", "keys"), SPELLED, ids=str)
def test_an_anchor_moves_as_its_equation_says(name: str, keys: dict[str, float | str]):
    outer: OuterMethod = make_outer(name, preset_manifest(name).outer.hyper | keys)
    random = torch.Generator().manual_seed(0)
    changes = [0.1 * torch.randn(40, generator=random) for _ in range(9)]
    x = first = torch.zeros(40)
    state = outer.init(x)
    for number, change in enumerate(changes):
        x, state = step(outer, x, change, state, peers=len(REFS), number=number)
    rows = [change.double().expand(len(REFS), -1) for change in changes]
    run = [Averaged(row_KN[0], REFS, row_KN, [0] * len(REFS)) for row_KN in rows]
    moved = EQUATIONS[name](run, dataclasses.asdict(outer))  # type: ignore[call-overload]
    torch.testing.assert_close(x.double() - first.double(), moved, rtol=1e-4, atol=1e-6)
    assert moved.abs().max() > 1e-3


def test_an_anchor_moves_as_derivatives_say():
    outer = make_outer("just_one_byte", {"lr": 0.3})
    random = torch.Generator().manual_seed(0)
    x = torch.zeros(300)
    run = []
    for number in range(5):
        said = [bytes(torch.randint(256, (12 + n,), generator=random).tolist()) for n in (4, 0, 40)]
        refs = [FrameRef(bytes([n]) * 32, bytes(32), 0, 1, 1, 0, one) for n, one in enumerate(said)]
        told = tuple(Contributor(ref.peer, summary=ref.summary) for ref in refs)
        mean = torch.stack([outer.rebuilt(one, {"weight": (30, 10)}) for one in told]).mean(0)
        x, _ = outer.outer_step(x, {"change": mean}, {}, RoundInfo(number, told))
        run.append(Averaged(torch.zeros(300, dtype=torch.float64), refs, name="weight"))
    moved = EQUATIONS["just_one_byte"](run, dataclasses.asdict(outer))  # type: ignore[call-overload]
    torch.testing.assert_close(x.double(), moved, rtol=1e-4, atol=1e-3)
    assert moved.abs().max() > 1
