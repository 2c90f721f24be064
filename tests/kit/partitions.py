"""Swarms that fall apart and meet again: terms, partitions, and what must hold afterwards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from decentral.consensus.chain import Branch, Head
from decentral.wire.keys import peer_name
from decentral.wire.messages import Record
from tests.kit.gossip_learners import accounted_for, given_by

DENSE = {"chain": "none", "feedback": "none"}
SPARSE = {"chain": "topk(k=64, chunk=4096)", "feedback": "ef(beta=1.0)"}


def exact_terms(terms, compressor, exchange: str = "gather"):
    """Terms under which every number of a run is a whole one, so that equality is exact."""
    manifest = terms("sparseloco", lease=2.0, shrink_after=4.0)
    return manifest.changed(
        compressor=compressor,
        outer={"learning_rate": 1.0, "norm_clip": None},
        exchange={"kind": exchange},
        inner={"steps": 4},
    )


def weight(members) -> int:
    return max(member.node.driver.head.tokens for member in members)


async def partition(lab, kinds, split: int, heavier: str):
    """A swarm that was cut in two until both sides have committed alone, and one side's chain is the heavier one. The
    larger side wins, and comes first.
    """
    await lab.start(kinds, rounds=2)
    few, many = lab.members[:split], lab.members[split:]
    lab.cut(few, many)
    fork = max(member.rounds for member in lab.members)
    heavy, light = (many, few) if heavier == "many" else (few, many)
    assert not lab.members[0].node.driver.state.given_up
    await lab.until(lambda: all(m.rounds >= fork + 2 for m in lab.members) and weight(heavy) > 1.2 * weight(light))
    check_shrunk(few, many)
    lab.heal(few, many)
    return many, few


def check_shrunk(few, many):
    """The smaller side says that it gave up a majority, in its chain as in its events; the larger side did not."""
    assert not any(member.happened("shrunk") or member.node.driver.state.given_up for member in many)
    gone = {member.signer.peer for member in many}
    for member in few:
        (shrunk,) = member.happened("shrunk")
        assert set(shrunk["given_up"]) == {peer_name(peer) for peer in gone}
        assert member.node.driver.state.given_up == gone
        dropped = [set(c.record.members) - set(c.record.next_members) for c in member.log]
        assert gone in dropped, "recorded in the chain"


async def settle(lab):
    """One chain, everybody in it, nobody training, nothing in flight."""
    await lab.all_members()
    await lab.rounds(2)
    await lab.rest()
    await lab.one_head()
    await lab.until(lambda: all(m.is_up_to_date for m in lab.members))


def check_progress(lab, chain):
    """Every inner step of every peer is in the anchor once, or its peer's to give: in its debt or its live model."""
    assert not any(member.node.driver.state.given_up for member in lab.members), "healed: nobody is given up any more"
    assert len({member.node.replica.digest for member in lab.members}) == 1
    for member in lab.members:
        found = accounted_for(member, given_by(member, chain))
        torch.testing.assert_close(found, member.moved[0], rtol=0, atol=1.0, msg="progress was lost or counted twice")


def next_commit(driver: Any, like: Record | None = None, **fields: Any) -> tuple[Head, Branch]:
    """The head after a commit that follows a driver's own, and the way there: but for ``fields`` it is the newest's."""
    head = driver.head
    follows = {
        "epoch": head.epoch,
        "round": head.round + 1,
        "outer_step": head.outer_step,
        "previous": head.hash,
        "base": head.anchor,
        "members": head.members,
        "next_members": head.members,
        "fragment": head.fragment(len(driver.state.replica.anchors)),
    }
    record = replace(like or driver.machine.state.recent[head.round].record, **follows | fields)
    after = replace(head.extended(record), anchor=head.anchor)
    return after, Branch(head, (after,), (record,))


def heavier(head: Head, name: bytes) -> Head:
    """A head one round further, of a chain with more in it."""
    return replace(head, round=head.round + 1, tokens=head.tokens + 1, hash=name * 32)


async def contributing(lab, num_contributions: int):
    """A member beside another one that has contributed so often."""
    member, _ = lab.add(), lab.add()
    state = member.node.driver.state
    await lab.until(lambda: len(member.node.driver.head.members) == 2 and state.contributed > num_contributions)
    return member
