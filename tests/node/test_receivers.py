"""Rounds of real nodes whose receivers remember: peers die, join, leave and come back, and all hold the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decentral.manifest import Manifest
from decentral.replica.contents import sender_name
from tests.kit.blocks import two_blocks
from tests.kit.gossip_learners import Learner
from tests.kit.nodes import Lab, Member, scene, small_terms, tiny_model
from tests.kit.partitions import check_progress, partition, settle

SPARSE = "topk(k=32, chunk=256)"
each_mechanism = pytest.mark.parametrize(
    "feedback", ["ef21", pytest.param("econtrol(eta=0.01)", marks=pytest.mark.long)]
)


def remembering(feedback: str, chain: str = SPARSE, **outer: Any) -> Manifest:
    manifest: Manifest = small_terms("sparseloco", lease=2.0, shrink_after=4.0)
    return manifest.changed(
        compressor={"chain": chain, "feedback": feedback},
        outer={"learning_rate": 1.0, "norm_clip": None, **outer},
        inner={"steps": 4},
    )


async def rest(lab: Lab) -> None:
    await lab.rest()
    await lab.one_head()


def kept_by(member: Member) -> dict[str, torch.Tensor]:
    return member.node.replica.senders.tensors()


def check_alike(members: list[Member]) -> None:
    """Digests, and what no digest covers: what is kept of senders, of whom all are members."""
    first, *others = members
    here = {peer.hex() for peer in first.node.driver.head.members}
    assert kept_by(first)
    assert {name.split("/")[2] for name in kept_by(first)} <= here
    for other in others:
        assert other.node.replica.digest == first.node.replica.digest
        assert set(kept_by(other)) == set(kept_by(first))
        for name, tensor in kept_by(first).items():
            assert torch.equal(tensor.view(torch.int32), kept_by(other)[name].view(torch.int32)), name


@each_mechanism
@pytest.mark.parametrize("fragments", [pytest.param(1, marks=pytest.mark.long), 2])
@scene(
    lambda feedback, fragments: remembering(feedback, fragments=fragments),
    peers=4,
    rounds=4,
    make_model=two_blocks,
    spread=0.02,
)
async def test_after_a_death_and_a_join_all_hold_the_same_of_every_sender(
    lab: Lab, feedback: str, fragments: int
) -> None:
    lab.members[1].kill()
    await lab.all_members()
    await lab.rounds(3)
    joiner = lab.add()
    await lab.all_members()
    await lab.rounds(6)
    await rest(lab)
    check_alike(lab.alive())
    of_joiner = [sender_name(f, joiner.signer.peer, "sent") for f in range(fragments)]
    assert set(of_joiner) <= set(kept_by(lab.members[0])), "it contributed"
    assert not any(lab.members[1].signer.peer.hex() in name for name in kept_by(joiner))
    lab.check_equal()
    assert not any(member.happened("sync_failed") or member.happened("donor_dropped") for member in lab.alive())


@each_mechanism
@scene(lambda feedback: remembering(feedback), peers=3, rounds=3, make_model=tiny_model, spread=0.02)
async def test_who_leaves_and_comes_back_starts_anew_on_every_peer(lab: Lab, feedback: str) -> None:
    members, leaver = lab.members, lab.members[2]
    await leaver.node.driver.membership.say_goodbye()
    await lab.until(lambda: all(leaver.signer.peer not in m.node.driver.head.members for m in members[:2]))
    await lab.until(lambda: all(m.node.driver.head.anchor is not None for m in members[:2]))
    assert not any(leaver.signer.peer.hex() in name for m in members[:2] for name in kept_by(m))
    leaver.node.driver.membership.come_back()
    await lab.all_members()
    await lab.rounds(4)
    await rest(lab)
    check_alike(lab.members)
    assert sender_name(0, leaver.signer.peer, "sent") in kept_by(members[0])
    lab.check_equal()


@each_mechanism
@scene(lambda feedback: remembering(feedback), peers=3, rounds=3, make_model=tiny_model, spread=0.02)
async def test_what_is_in_flight_of_who_was_left_out_is_encoded_anew(lab: Lab, feedback: str) -> None:
    """Else the others would add a change of what they have forgotten."""
    members, away = lab.members, lab.members[2]
    for member in members[:2]:
        member.idle = True  # nothing is committed but memberships
    driver, replica = away.node.driver, away.node.replica
    await lab.until(lambda: driver.state.pending is not None)
    away.idle = True
    pending, shapes = driver.state.pending, replica.shapes(0)
    lab.cut([away], members[:2])
    await lab.until(lambda: all(away.signer.peer not in m.node.driver.head.members for m in members[:2]))
    lab.heal([away], members[:2])
    await lab.until(lambda: not driver.state.is_member)
    assert driver.state.pending is pending
    anew = replica.codec.encode(pending.gradient_N, replica.feedback[0], shapes)
    await lab.until(lambda: driver.state.pending is None)
    await rest(lab)
    sent = kept_by(members[0])[sender_name(0, away.signer.peer, "sent")]
    assert torch.equal(sent, replica.codec.decompress(anew.payloads))
    check_alike(lab.members)


class Counted(Learner):
    """What a commit took from it is what receivers held of it then."""

    tokens = 10

    def sent(self, update: Any) -> torch.Tensor:
        return self.node.replica.senders.of(0, self.signer.peer)["sent"]


class Heavy(Counted):
    tokens = 50


@pytest.mark.parametrize(
    ("winner", "chain", "feedback"),
    [
        ("many", "none", "ef21"),
        ("few", SPARSE, "econtrol(eta=0.0)"),
        pytest.param("few", "none", "ef21", marks=pytest.mark.long),
        pytest.param("many", SPARSE, "econtrol(eta=0.0)", marks=pytest.mark.long),
    ],
)
@scene(lambda chain, feedback: remembering(feedback, chain), make_model=tiny_model)
async def test_what_was_given_to_rounds_that_are_given_up_is_owed_again(
    lab: Lab, winner: str, chain: str, feedback: str
) -> None:
    """Whole numbers, so equality is exact. Each of those rounds applied all that receivers held, not what came."""
    few = Heavy if winner == "few" else Counted
    won, lost = await partition(lab, [few] * 2 + [Counted] * 3, 2, winner)
    await settle(lab)
    for member in lost:
        (healed,) = member.happened("healed")
        assert healed["given_up"] >= healed["kept"] >= 2
    check_progress(lab, won[0].log)
    check_alike(lab.members)
