"""Buffers among real nodes under virtual time: each peer's are its number, so that a mean tells who was in it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from decentral.consensus.chain import contributions
from decentral.node.node import largest_offer, make_replica
from decentral.parameters import schema_of
from decentral.replica.contents import Tail
from tests.kit.nodes import Lab, Member, scene, small_terms
from tests.kit.tables import DOSED_WIRES


def normed() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))


def shared(member: Member) -> list[float]:
    """The distinct values of the means (the count of batches is a whole number, and rounded)."""
    return torch.unique(member.node.replica.buffers_B[:-1]).tolist()


def is_applied(member: Member) -> bool:
    """Whether the newest commit is, too, and not only decided."""
    return member.node.driver.head.anchor is not None


def mean_of_the_last(lab: Lab, member: Member) -> float:
    """What the newest commit of fragment 0 says, by the numbers of those that it names."""
    numbers = {one.signer.peer: one.number for one in lab.members}
    of_fragment_0 = [commit.record for commit in member.log if commit.record.fragment == 0 and commit.record.frames]
    named = [numbers[ref.peer] for ref in contributions(of_fragment_0[-1])]
    return float(torch.tensor(named, dtype=torch.float64).mean().to(torch.float32))


@pytest.mark.parametrize("preset", DOSED_WIRES)
@scene(
    lambda preset: small_terms(preset).changed(outer=({"fragments": 2} if preset == "streaming" else {})),
    peers=3,
    rounds=4,
    make_model=normed,
)
async def test_the_buffers_of_a_commit_are_the_mean_of_those_that_it_names(lab, preset):
    await lab.until(lambda: all(map(is_applied, lab.members)))
    for member in lab.members:
        assert shared(member) == [mean_of_the_last(lab, member)]
    assert shared(lab.members[0]) == [1.0]  # of 0, 1 and 2
    lab.check_equal()


class LiesOfItsOwn(Member):
    """Contributes buffers of 1e30."""

    def tail(self, fragment: int) -> bytes:
        tail = self.node.replica.tail
        return tail.pack(torch.full((tail.numel,), 1e30)) if tail.nbytes(fragment) else b""


class LyingTail(Tail):
    """Of an owner that makes 1e30 of whatever the contributors have."""

    def pack_merge(self, tails: Sequence[torch.Tensor]) -> bytes:
        return self.pack(torch.full((self.numel,), 1e30)) if tails else b""


class LiesOfThoseOfAll(Member):
    def __init__(self, lab: Lab, number: int, founder: bool) -> None:
        super().__init__(lab, number, founder)
        tail = self.node.replica.tail
        self.node.replica.tail = LyingTail(tail.buffers, tail.numel, tail.takes_first)


def wide() -> torch.nn.Module:
    """Each of three owns a part of a reduce: they are cut at multiples of 4096."""
    return torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.BatchNorm1d(128))


@pytest.mark.parametrize(
    ("preset", "liar", "place", "most"),
    [
        ("sparseloco", LiesOfItsOwn, 2, 7.0),
        ("diloco", LiesOfItsOwn, 2, 7.0),
        ("diloco", LiesOfThoseOfAll, 0, 1.0),
        ("diloco", LiesOfThoseOfAll, 1, 1.0),
    ],
)
@scene(make_model=wide)
async def test_one_of_three_that_lies_of_buffers_moves_them_no_further_than_the_others_differ(
    lab, preset, liar, place, most
):
    """The others have 0 and 1, and of three the mean takes in what is within 15 times the smaller gap."""
    await lab.start([liar if number == place else None for number in range(3)], rounds=3)
    await lab.until(lambda: all(map(is_applied, lab.members)))
    lab.check_equal()
    assert all(0.0 <= value <= most for member in lab.members for value in shared(member))
    named = [len(contributions(commit.record)) for commit in lab.members[0].log if commit.record.frames]
    assert named[-1] == 3


@pytest.mark.parametrize("preset", ["sparseloco", "diloco"])
@pytest.mark.parametrize(("rounds", "adopts"), [(1, False), (40, True)])
@scene(peers=3, make_model=normed)
async def test_a_peer_that_was_cut_off_has_the_buffers_of_the_others_again(lab, preset, rounds, adopts):
    """After a round it replays the frames that it missed, after many it takes a snapshot."""
    *others, lost = lab.members
    lost.idle = True
    lab.cut([lost], others)
    goal = max(member.rounds for member in others) + rounds
    await lab.until(lambda: all(member.rounds >= goal and is_applied(member) for member in others))
    assert shared(others[0]) == [mean_of_the_last(lab, others[0])]
    for member in others:
        member.idle = True
    lab.heal([lost], others)
    await lab.until(lambda: lost.node.replica.digest == others[0].node.replica.digest)
    assert shared(lost) == shared(others[0])
    assert bool(lost.happened("resynced")) == adopts
    told = [update.buffers_B for update in lost.all_updates if update.after_N is not None]
    assert torch.equal(told[-1], lost.node.replica.buffers_B)


@scene("noloco", peers=2, make_model=normed)
async def test_both_of_a_pair_take_the_mean_and_a_newcomer_begins_with_its_donors(lab):
    await lab.until(lambda: all(any(swap.partner for swap in member.swaps) for member in lab.members))
    for member in lab.members:
        together = [swap for swap in member.swaps if swap.partner is not None]
        assert torch.unique(together[-1].buffers_B[:-1]).tolist() == [0.5]
    third = lab.add()
    await lab.until(lambda: third.node.ready.is_set())
    assert shared(third) in ([0.5], [0.0], [1.0])  # of a pair, or of a step that its donor took alone


def test_the_anchors_digest_names_the_buffers_and_an_offer_has_room_for_them():
    manifest, schema = small_terms("sparseloco"), schema_of(normed())
    anchors, buffers = [torch.zeros(fragment.numel) for fragment in schema.fragments], torch.zeros(schema.buffer_numel)
    one, other = make_replica(manifest, schema, anchors, buffers), make_replica(manifest, schema, anchors, buffers + 1)
    assert one.digest != other.digest == one.digest_of(other.shared_tensors())
    own = make_replica(manifest.changed(model={"buffers": "own"}), schema, anchors, buffers)
    rooms = [largest_offer(replica, gossips=False, fragments=1) for replica in (own, one)]
    assert rooms[1] == rooms[0] + 4 * schema.buffer_numel
