"""Rounds in which some contributors count nothing, or none counts: they end, and nobody loses what others gave."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decentral.observe.health import Notices
from decentral.replica.replica import OWED
from decentral.replica.weights import NOBODY
from tests.kit.gossip_learners import Learner
from tests.kit.nodes import Lab, tiny_model
from tests.kit.partitions import exact_terms, settle

SPARSE = {"chain": "topk(k=3, chunk=64)", "feedback": "ef(beta=1.0)"}
DENSE = {"chain": "none", "feedback": "none"}


class Wild(Learner):
    """Is an outlier once ``wild``."""

    wild = False

    def step(self) -> None:
        super().step()
        if self.wild:
            for fragment in range(len(self.moved)):
                self.model.write(fragment, self.model.read(fragment) * 1000 + 1000.0)


def edit_terms(terms: Any, compressor: Any, exchange: str) -> Any:
    found = exact_terms(terms, compressor, exchange)
    tables = found.model_dump()
    alike = {"relative_temperature": 1e30, "clip": 1e30}
    tables["outer"] = {"method": "edit", "learning_rate": 1.0, "momentum": 0.0, **alike}
    return found.of(tables, "terms")


def is_used_to(lab: Lab, norm: float) -> None:
    for member in lab.members:
        for state in member.node.replica.states:
            state["usual"] = torch.tensor([1000.0, norm, 1e-3 * norm * norm, 1.0])


@pytest.mark.parametrize("exchange", ["gather", "reduce"])
def test_a_round_in_which_nobody_counts_ends_and_moves_nothing(run_lab: Any, terms: Any, exchange: str) -> None:
    async def script(lab: Lab) -> None:
        for _ in range(3):
            lab.add(kind=Learner)
        await settle(lab)
        is_used_to(lab, 1.0)
        before = lab.members[0].node.replica.anchors[0]
        for member in lab.members:
            member.idle = False
        await lab.rounds(3)
        for member in lab.members:
            assert torch.equal(member.node.replica.anchors[0], before)
            (told, *_), notices = member.happened("unmoved"), Notices()
            assert (told["method"], told["why"]) == ("edit", NOBODY)
            assert "moved nothing: edit: every contributor counts nothing" in str(notices.hear("unmoved", told, ""))
            assert notices.now(told["round"])
            assert int(member.node.replica.states[0]["frozen"]) >= 3

    run_lab(edit_terms(terms, DENSE, exchange), script, make_model=tiny_model)


def test_who_counts_nothing_keeps_what_it_owes_of_elements_that_another_owns(run_lab: Any, terms: Any) -> None:
    """Nothing times infinity ended its process, as any error does that is none of ours."""

    async def script(lab: Lab) -> None:
        for _ in range(3):
            lab.add(kind=Wild)
        await settle(lab)
        owner = lab.members[0].log[-1].record.partition[0][0]
        wild, *_ = (member for member in lab.members if member.signer.peer != owner)
        replica, wild.wild = wild.node.replica, True
        owed_N = torch.full((replica.numel(0),), 7.0)
        replica.feedback[0] = {**replica.feedback[0], OWED: owed_N}
        is_used_to(lab, 1e5)
        for member in lab.members:
            member.idle = False
        first = wild.node.driver.state.contributed
        await lab.until(lambda: wild.node.driver.state.contributed >= first + 2)
        assert all(record.partition[0][0] == owner for record in (commit.record for commit in wild.log[-2:]))
        assert torch.equal(replica.residual(0), owed_N)

    run_lab(edit_terms(terms, SPARSE, "reduce"), script, make_model=tiny_model)
