"""Rounds of real nodes whose receivers remember: peers die, join, leave and come back, and all hold the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decentral.manifest import Manifest
from decentral.replica.contents import sender_name
from tests.kit.blocks import two_blocks
from tests.kit.gossip_learners import Learner
from tests.kit.nodes import Lab, Member, tiny_model
from tests.kit.partitions import check_progress, partition, settle

SPARSE = "topk(k=32, chunk=256)"
each_mechanism = pytest.mark.parametrize("feedback", ["ef21", "econtrol(eta=0.01)"])


def remembering(terms: Any, feedback: str, chain: str = SPARSE, **outer: Any) -> Manifest:
    manifest: Manifest = terms("sparseloco", lease=2.0, shrink_after=4.0)
    return manifest.changed(
        compressor={"chain": chain, "feedback": feedback},
        outer={"learning_rate": 1.0, "norm_clip": None, **outer},
        inner={"steps": 4},
    )


async def rest(lab: Lab) -> None:
    """Nobody trains, nothing is in flight, and all stand at one head."""
    for member in lab.alive():
        member.idle = True
    await lab.until(lambda: all(m.node.driver.pending is None for m in lab.alive()))
    await lab.until(lambda: len({m.node.driver.head.hash for m in lab.alive()}) == 1)


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
@pytest.mark.parametrize("fragments", [1, 2])
def test_after_a_death_and_a_join_all_hold_the_same_of_every_sender(
    run_lab: Any, terms: Any, feedback: str, fragments: int
) -> None:
    async def script(lab: Lab) -> None:
        for _ in range(4):
            lab.add()
        await lab.all_members()
        await lab.rounds(4)
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
        events = [event for member in lab.alive() for event, _ in member.events]
        assert "sync_failed" not in events
        assert "donor_dropped" not in events

    run_lab(remembering(terms, feedback, fragments=fragments), script, make_model=two_blocks, spread=0.02)


@each_mechanism
def test_who_leaves_and_comes_back_starts_anew_on_every_peer(run_lab: Any, terms: Any, feedback: str) -> None:
    async def script(lab: Lab) -> None:
        members = [lab.add() for _ in range(3)]
        await lab.all_members()
        await lab.rounds(3)
        leaver = members[2]
        await leaver.node.driver.goodbye()
        await lab.until(lambda: all(leaver.signer.peer not in m.node.driver.head.members for m in members[:2]))
        await lab.until(lambda: all(m.node.driver.head.anchor is not None for m in members[:2]))
        assert not any(leaver.signer.peer.hex() in name for m in members[:2] for name in kept_by(m))
        await leaver.node.driver.come_back()
        await lab.all_members()
        await lab.rounds(4)
        await rest(lab)
        check_alike(lab.members)
        assert sender_name(0, leaver.signer.peer, "sent") in kept_by(members[0])
        lab.check_equal()

    run_lab(remembering(terms, feedback), script, make_model=tiny_model, spread=0.02)


@each_mechanism
def test_what_is_in_flight_of_who_was_left_out_is_encoded_anew(run_lab: Any, terms: Any, feedback: str) -> None:
    """Else the others would add a change of what they have forgotten."""

    async def script(lab: Lab) -> None:
        members = [lab.add() for _ in range(3)]
        await lab.all_members()
        await lab.rounds(3)
        away = members[2]
        for member in members[:2]:
            member.idle = True  # nothing is committed but memberships
        driver, replica = away.node.driver, away.node.replica
        await lab.until(lambda: driver.pending is not None)
        away.idle = True
        pending, shapes = driver.pending, replica.shapes(0)
        lab.cut([away], members[:2])
        await lab.until(lambda: all(away.signer.peer not in m.node.driver.head.members for m in members[:2]))
        lab.heal([away], members[:2])
        await lab.until(lambda: not driver.is_member)
        assert driver.pending is pending
        anew = replica.codec.encode(pending.gradient_N, replica.feedback[0], shapes)
        await lab.until(lambda: driver.pending is None)
        await rest(lab)
        sent = kept_by(members[0])[sender_name(0, away.signer.peer, "sent")]
        assert torch.equal(sent, replica.codec.decompress(anew.payloads))
        check_alike(lab.members)

    run_lab(remembering(terms, feedback), script, make_model=tiny_model, spread=0.02)


class Counted(Learner):
    """What a commit took from it is what receivers held of it then."""

    tokens = 10

    def sent(self, update: Any) -> torch.Tensor:
        return self.node.replica.senders.of(0, self.signer.peer)["sent"]


class Heavy(Counted):
    tokens = 50


@pytest.mark.parametrize("winner", ["many", "few"])
@pytest.mark.parametrize(("chain", "feedback"), [("none", "ef21"), (SPARSE, "econtrol(eta=0.0)")])
def test_what_was_given_to_rounds_that_are_given_up_is_owed_again(
    run_lab: Any, terms: Any, chain: str, feedback: str, winner: str
) -> None:
    """Whole numbers, so equality is exact. Each of those rounds applied all that receivers held, not what came."""

    async def script(lab: Lab) -> None:
        few = Heavy if winner == "few" else Counted
        won, lost = await partition(lab, [few] * 2 + [Counted] * 3, 2, winner)
        await settle(lab)
        for member in lost:
            (healed,) = member.happened("healed")
            assert healed["given_up"] >= healed["kept"] >= 2
        check_progress(lab, won[0].log)
        check_alike(lab.members)

    run_lab(remembering(terms, feedback, chain), script, make_model=tiny_model)
