"""Swarms whose compressors drop most of what they are given: it is delivered, or somebody owes it."""

from __future__ import annotations

import anyio
import pytest
import torch

from decentral.consensus.chain import Branch
from decentral.replica.contribution import Contribution
from decentral.replica.replica import OWED
from decentral.rounds.gossip import Gossip
from decentral.wire.messages import FrameRef
from tests.kit.gossip_learners import Learner
from tests.kit.nodes import Member, scene, small_terms, tiny_model
from tests.kit.partitions import contributing, exact_terms, heavier, next_commit, settle

SPARSE = {"chain": "topk(k=3, chunk=64)", "feedback": "ef(beta=1.0)"}


def owed_by_owners(lab) -> torch.Tensor:
    owed = [member.node.replica.owed_as_owner(0) for member in lab.members]
    return sum((one for one in owed if one is not None), torch.zeros(lab.schema.fragments[0].numel))


def books(lab) -> tuple[torch.Tensor, torch.Tensor]:
    """What was delivered or is owed by owners, and the mean of what peers say they gave; differences of it count."""
    anchor = lab.members[0].node.replica.anchors[0]
    gave = []
    for member in lab.members:
        debt = member.node.replica.feedback[0].get("debt", torch.zeros_like(anchor))
        progress = anchor - member.model.read(0)
        gave.append(-member.moved[0] - debt - progress)
    return owed_by_owners(lab) - anchor, sum(gave) / len(gave)


@scene(lambda: exact_terms(small_terms, SPARSE, "reduce"), peers=[Learner] * 3, make_model=tiny_model)
async def test_a_reduce_of_a_sparse_compressor_delivers_what_it_was_given_or_owes_it(lab):
    """62 % of it was owed by nobody: what compressing a result lost was gone."""
    await settle(lab)
    before, first = books(lab), len(lab.members[0].log)
    for member in lab.members:
        member.idle = False
    await lab.rounds(6)
    await settle(lab)
    between = [commit.record for commit in lab.members[0].log[first:]]
    assert all(len(record.contributors) in (0, 3) for record in between), "else it is not the mean of three"
    assert sum(bool(record.partition) for record in between) >= 6
    delivered, given = (after - old for after, old in zip(books(lab), before, strict=True))
    assert owed_by_owners(lab).any()
    assert torch.equal(delivered, given)


@scene(lambda: exact_terms(small_terms, SPARSE, "reduce"), make_model=tiny_model)
async def test_a_snapshot_takes_of_what_an_owner_owes_what_its_records_took_and_a_rival_branch_all(lab):
    """Contributors owe again what went into rounds that are given up: what was left of it would be given twice."""
    member = await contributing(lab, 1)
    driver, replica, numel = member.node.driver, member.node.replica, lab.schema.fragments[0].numel
    start = driver.machine.state.history.newest_of(reversed(driver.machine.state.history.locator()))
    other = lab.members[1].signer.peer
    made, theirs = FrameRef(driver.state.me, b"m" * 32, 0, 1, 1), FrameRef(other, b"t" * 32, 0, 1, 1)
    head, branch = next_commit(driver, frames=(made,), contributors=(theirs,), partition=((driver.state.me, 0, numel),))
    replica.feedback[0] = {OWED: torch.ones(numel)}
    driver.state.sums.left = {made.frame: torch.full((numel,), 2.0)}
    await driver.adoption.adopt(head, {}, branch)
    assert torch.equal(replica.owed_as_owner(0), torch.full((numel,), 2.0))
    rival = heavier(head, b"r")
    await driver.adoption.adopt(rival, {}, Branch(start, (rival,)))
    assert replica.owed_as_owner(0) is None


class Even(Member):
    """Gossips changes that it counts."""

    async def _gossip(self, gossip: Gossip) -> None:
        replica, generator = self.node.replica, torch.Generator().manual_seed(self.number)
        self.changed = torch.zeros_like(replica.anchors[0])
        while not self.idle:
            await anyio.sleep(self.lab.step)
            change = torch.randn(self.changed.shape, generator=generator)
            self.changed += change
            mine = Contribution(0, b"", replica.anchors[0] - change, change, 1, 1, states=(replica.anchors[0],))
            self.swaps.append(await gossip.exchange(mine))


@pytest.mark.parametrize("feedback", ["ef(beta=1.0)", "dgc(momentum=0.0)"])
@scene(
    lambda feedback: small_terms("noloco").changed(
        compressor={"chain": "fp8", "feedback": feedback}, outer={"alpha": 0.0, "beta": 0.5, "gamma": 0.5}
    ),
    peers=[Even] * 2,
    make_model=tiny_model,
)
async def test_gossip_delivers_what_compression_lost_of_a_change_in_a_later_step(lab, feedback):
    """It encoded without the manifest's feedback: what was lost was gone."""
    await lab.until(lambda: all(len(m.swaps) >= 12 for m in lab.members))
    for member in lab.members:
        member.idle = True
    await lab.until(lambda: lab.members[0].node.gossip.step == lab.members[1].node.gossip.step)
    assert any(swap.partner is not None for member in lab.members for swap in member.swaps)
    replicas = [member.node.replica for member in lab.members]
    debts = sum(replica.feedback[0]["debt"] for replica in replicas)
    assert debts.any()
    moved = sum(replica.anchors[0] for replica in replicas)
    changed = sum(member.changed for member in lab.members)
    torch.testing.assert_close(moved + 0.5 * debts, 0.5 * changed, rtol=0, atol=1e-4)
