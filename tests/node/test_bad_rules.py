"""An aggregation rule that gives what nobody can use: nothing moves, on every peer alike, and no process ends."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import pytest
import torch

from decentral.optimizers import Aggregation
from decentral.optimizers.aggregation.base import Needs, Sent
from decentral.optimizers.diloco import DiLoCo
from tests.kit.gossip_learners import Learner
from tests.kit.nodes import Lab, tiny_model
from tests.kit.partitions import settle

GIVES = {  # by fault: each scale, and what is told
    "raises": (1.0, "bad: weigh raised ZeroDivisionError"),
    "shapes": (1.0, "bad: weigh raised RuntimeError: The size of tensor"),
    "attributes": (1.0, "bad: weigh raised AttributeError"),
    "overflows": (1e300, "bad: weigh gave no float32"),
    "NaN": (math.nan, "bad: weigh gave NaN or Inf"),
    "too few": (1.0, "bad: weigh gave no float32 for each of 3"),
    "a sum beyond float32": (3e38, "the mean of the contributions is beyond float32"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Bad(Aggregation):
    """Looks at norms, and is wrong."""

    name: ClassVar[str] = "bad"
    fault: str

    @property
    def needs(self) -> Needs:
        return "norms"

    def weigh(self, sent: Sent) -> list[float]:
        if self.fault == "raises":
            return [1 / (norm - norm) for norm in sent.norm_K.tolist()]
        if self.fault == "shapes":
            torch.ones(2) + torch.ones(3)
        if self.fault == "attributes":
            return list(sent.lengths)  # type: ignore[attr-defined]  # the fault
        return [GIVES[self.fault][0]] * (1 if self.fault == "too few" else len(sent))


def with_rule(member: Learner, rule: Aggregation) -> None:
    member.node.replica.rule = rule


@pytest.mark.parametrize("exchange", ["gather", "reduce"])
@pytest.mark.parametrize("fault", GIVES)
def test_a_rule_that_is_wrong_moves_nothing_and_ends_no_process(
    run_lab: Any, terms: Any, exchange: str, fault: str
) -> None:
    async def script(lab: Lab) -> None:
        for _ in range(3):
            lab.add(kind=Learner)
        await settle(lab)
        before = lab.members[0].node.replica.anchors[0]
        sound = lab.members[0].node.replica.rule
        for member in lab.members:
            with_rule(member, Bad(fault))
            member.node.replica.method, member.idle = DiLoCo(lr=0.5, momentum=0.0), False
        await lab.rounds(2)
        await settle(lab)
        told = [str(fields["why"]) for member in lab.members for event, fields in member.events if event == "unmoved"]
        assert len(told) >= 2
        assert all(GIVES[fault][1] in why for why in told)
        for member in lab.members:
            assert torch.equal(member.node.replica.anchors[0], before)
            with_rule(member, sound)
            member.idle = False
        await lab.rounds(2)
        lab.check_equal()
        assert not torch.equal(lab.members[0].node.replica.anchors[0], before)

    run_lab(terms("diloco").changed(exchange={"kind": exchange}), script, make_model=tiny_model)
