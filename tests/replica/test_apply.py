"""What came of each channel: one mean of all, or a row of each in the order of the peers' ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.manifest import check_methods, preset_manifest
from decentral.optimizers import CHANGE, Channel, Contributor, OuterMethod, RoundInfo
from decentral.optimizers.just_one_byte import JustOneByte
from decentral.replica.apply import rebuilt
from decentral.replica.weights import Unusable
from tests.kit.learners import Learners
from tests.kit.replicas import NUMEL, PARAMETERS, SIGNERS

ROWS = dataclasses.replace(CHANGE, combine="each")


@dataclasses.dataclass(frozen=True, slots=True)
class Rows(OuterMethod):
    """Remembers what it was given, and steps along the mean of the rows."""

    name: ClassVar[str] = "rows"
    seen: list[tuple[Mapping[str, Tensor], RoundInfo]] = dataclasses.field(default_factory=list)

    def channels(self) -> tuple[Channel, ...]:
        return ROWS, Channel("mean"), Channel("each", combine="each")

    def states_sent(self, anchor_N: Tensor, live: object, fragment: int) -> dict[str, Tensor]:
        return {"mean": anchor_N + 1, "each": anchor_N + 2}

    def outer_step(
        self, anchor: Tensor, received: Mapping[str, Tensor], state: Mapping[str, Tensor], info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        self.seen.append((received, info))
        return anchor - received["change"].sum(0) / len(received["change"]), {}


def test_rows_are_what_each_sent_by_peer_and_means_stay_means():
    method = Rows()
    run = Learners(method, 3, torch.zeros(NUMEL))
    steps = [torch.full((NUMEL,), float(n + 1)) for n in range(3)]
    run.learn(dict(enumerate(steps)))
    run.meet((0, 2))
    for received, info in method.seen:
        assert [one.peer for one in info.contributors] == [SIGNERS[0].peer, SIGNERS[2].peer]
        torch.testing.assert_close(received["change"], -torch.stack([steps[0], steps[2]]), rtol=0, atol=0)
        torch.testing.assert_close(received["mean"], torch.ones(NUMEL), rtol=0, atol=0)
        torch.testing.assert_close(received["each"], torch.full((2, NUMEL), 2.0), rtol=0, atol=0)
        assert info.names == tuple(PARAMETERS)
        assert sum(torch.Size(shape).numel() for shape in info.shapes) == NUMEL
    assert len({peer.replica.digest for peer in run.peers}) == 1


def test_a_reduce_has_no_rows_and_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("decentral.optimizers.diloco.DiLoCo.channels", lambda self: (ROWS,))
    with pytest.raises(ConfigError, match=r'use exchange\.kind = "gather"'):
        check_methods(preset_manifest("diloco"))
    check_methods(preset_manifest("diloco", exchange={"kind": "gather"}))


# ---- test rebuilt ----
#
# A method whose contributions are made of summaries, and makes what nobody can use: nothing moves, and it is said.

LAYOUT = {"a": (2, 3), "b": (4,)}
TOLD = [Contributor(bytes([n]) * 32, summary=bytes([n]) * 13) for n in range(2)]


class Bad(JustOneByte):
    def __init__(self, made: Any) -> None:
        super().__init__()
        object.__setattr__(self, "made", made)

    def rebuilt(self, told: Contributor, layout: Any) -> Any:
        return self.made(told)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda told: told.loss, "just_one_byte: rebuilt raised AttributeError"),
        (lambda told: torch.zeros(9), r"rebuilt gave torch.float32 \(9,\), want \(10,\)"),
        (lambda told: torch.zeros(10, dtype=torch.float64), "rebuilt gave torch.float64"),
        (lambda told: None, "just_one_byte: rebuilt gave nothing"),
    ],
    ids=["raises", "too short", "of another dtype", "nothing"],
)
def test_what_cannot_be_used_is_said(made: Any, why: str):
    with pytest.raises(Unusable, match=why):
        rebuilt(Bad(made), TOLD, LAYOUT, (1.0, 1.0), CHANGE)


def test_it_is_the_mean_by_weights_of_what_each_summary_says():
    method, each = JustOneByte(), [JustOneByte().rebuilt(one, LAYOUT) for one in TOLD]
    found = rebuilt(method, TOLD, LAYOUT, (1.0, 3.0), CHANGE)["change"]
    torch.testing.assert_close(found, (each[0] + 3 * each[1]) / 4)
    assert each[1].any()
