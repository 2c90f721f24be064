"""Peers of every method meet in real rounds: commits are made, and all hold the same bits, their states, too."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from decentral.consensus.chain import contributions
from decentral.optimizers import make_outer, presets
from decentral.replica.contribution import Contribution
from decentral.wire.messages import Offer
from tests.kit.blocks import InTurns, check_alike, states_of, two_blocks
from tests.kit.nodes import Lab

SYNCHRONOUS = [name for name in presets() if make_outer(name, {}).topology == "all"]


PRODUCT = tuple(itertools.product(SYNCHRONOUS, ("gather", "reduce")))
TURNS = [pytest.param(*PRODUCT[n], marks=[pytest.mark.long] if n % 4 in (1, 2) else []) for n in range(len(PRODUCT))]


@pytest.mark.parametrize(("method", "exchange"), TURNS)  # of every method one, and the other is long
def test_rounds_are_made_and_all_hold_the_same_bits(run_lab: Any, terms: Any, method: str, exchange: str) -> None:
    async def script(lab: Lab) -> None:
        for _ in range(3):
            lab.add(kind=InTurns)
        await lab.all_members()
        await lab.rounds(8)
        for member in lab.members:
            member.idle = True
        await lab.until(lambda: all(m.node.driver.pending is None for m in lab.members))
        await lab.until(lambda: len({m.node.driver.head.hash for m in lab.members}) == 1)
        check_alike(lab.members)
        assert not [event for member in lab.members for event in member.events if event[0] == "dropped"]

    manifest = terms(method).changed(
        exchange={"kind": exchange},
        compressor={"chain": "bf16", "feedback": "none"},
        outer={"norm_clip": None, "fragments": 2, "overlap": 0},
        inner={"steps": 8},
    )
    run_lab(manifest, script, make_model=two_blocks)


@pytest.mark.parametrize("method", ["des_loc", "mt_dao"])
@pytest.mark.parametrize(
    ("exchange", "chain"),
    [
        ("gather", "topk(k=16, chunk=256) >> signmag2"),
        ("reduce", "topk(k=16, chunk=256)"),
        ("reduce", "int8(block=64)"),
    ],
)
def test_moments_with_a_compressor_of_their_own_are_averaged_alike_everywhere(
    run_lab: Any, terms: Any, method: str, exchange: str, chain: str
) -> None:
    async def script(lab: Lab) -> None:
        for _ in range(3):
            lab.add(kind=InTurns)
        await lab.all_members()
        await lab.rounds(8)
        for member in lab.members:
            member.idle = True
        await lab.until(lambda: all(m.node.driver.pending is None for m in lab.members))
        await lab.until(lambda: len({m.node.driver.head.hash for m in lab.members}) == 1)
        check_alike(lab.members)
        assert len({member.node.replica.digest for member in lab.members}) == 1
        assert str(lab.members[0].node.replica.codec.beside) == "bf16"
        assert all(one.any() for one in states_of(lab.members[0]).values())
        assert not [event for member in lab.members for event in member.events if event[0] == "dropped"]

    periods = {"first_moment": 1, "second_moment": 2} if method == "des_loc" else {"slow": 1, "variance": 2}
    manifest = terms(method).changed(
        exchange={"kind": exchange},
        compressor={"chain": chain, "feedback": "ef(beta=0.95)"},
        outer={"norm_clip": None, "overlap": 0, **periods},
        inner={"steps": 4},
    )
    run_lab(manifest, script, make_model=two_blocks)


def test_an_offer_of_a_reduce_says_what_the_moments_take_too(run_lab: Any, terms: Any) -> None:
    """The size is what the others' patience is reckoned from."""

    async def script(lab: Lab) -> None:
        offers: list[Offer] = []
        for _ in range(2):
            lab.add(kind=InTurns)
        await lab.all_members()
        for member in lab.members:
            machine = member.node.driver.state.machine
            machine.offer = _told_to(offers, machine.offer)  # type: ignore[method-assign]
        await lab.rounds(3)
        numel = lab.members[0].node.replica.numel(0)
        assert offers
        assert min(offer.nbytes for offer in offers) > 2 * 2 * numel

    manifest = terms("mt_dao").changed(
        exchange={"kind": "reduce"},
        compressor={"chain": "topk(k=16, chunk=4096)", "feedback": "ef(beta=0.95)"},
        inner={"steps": 4},
    )
    run_lab(manifest, script, make_model=two_blocks)


def _told_to(offers: list[Offer], offer: Any) -> Any:
    def told(made: Offer, now: float) -> Any:
        offers.append(made)
        return offer(made, now)

    return told


def test_catching_up_by_frames_counts_the_moments_in_them(run_lab: Any, terms: Any) -> None:
    """A sparse change beside whole moments: three take more than a snapshot, and looked like a third."""

    async def script(lab: Lab) -> None:
        for _ in range(3):
            lab.add(kind=InTurns)
        await lab.all_members()
        await lab.rounds(3)
        member = lab.members[0]
        commit = next(commit for commit in reversed(member.log) if len(commit.record.frames) == 3)
        unknown = tuple(replace(ref, frame=ref.peer) for ref in commit.record.frames)
        missed = replace(commit, record=replace(commit.record, frames=unknown))
        assert not member.node.catch_up.is_cheap([missed])
        assert member.node.catch_up.is_cheap([commit])  # whose frames are here

    manifest = terms("mt_dao").changed(
        exchange={"kind": "gather"},
        compressor={"chain": "topk(k=16, chunk=4096)", "feedback": "ef(beta=0.95)"},
        inner={"steps": 4},
    )
    run_lab(manifest, script, make_model=two_blocks)


class Silent(InTurns):
    """Sends less than its round wants: no moments, and no zeros for them."""

    def __init__(self, lab: Lab, number: int, founder: bool) -> None:
        super().__init__(lab, number, founder)
        driver, contribute = self.node.driver, self.node.driver.contribute

        async def without_states(contribution: Contribution) -> bool:
            contribution.states = ()
            return await contribute(contribution)

        driver.contribute = without_states  # type: ignore[method-assign]


@pytest.mark.parametrize("exchange", ["gather", "reduce"])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_what_lacks_a_channel_is_left_out_and_ends_nobody(run_lab: Any, terms: Any, exchange: str, first: int) -> None:
    async def script(lab: Lab) -> None:
        for number in range(3):
            lab.add(kind=Silent if number == first else InTurns)
        await lab.all_members()
        await lab.rounds(3)
        liar = lab.members[first].signer.peer
        records = [commit.record for commit in lab.members[first].log if len(commit.record.members) == 3]
        assert sum(bool(record.frames) for record in records) >= 3
        assert all(ref.peer != liar for record in records for ref in contributions(record))

    manifest = terms("des_loc").changed(
        exchange={"kind": exchange},
        outer={"first_moment": 1, "second_moment": 1},
        inner={"steps": 4},
    )
    run_lab(manifest, script, make_model=two_blocks)


def test_an_adopted_snapshot_brings_the_shared_moments_to_the_inner_optimizer(run_lab: Any, terms: Any) -> None:
    async def script(lab: Lab) -> None:
        for _ in range(3):
            lab.add(kind=InTurns)
        await lab.all_members()
        away, others = lab.members[2:], lab.members[:2]
        for member in others:
            member.node.driver.state.store.capacity = 1  # as with a large model: only the newest frame stays
        lab.cut(away, others)
        goal = others[0].rounds + 4
        await lab.until(lambda: all(member.rounds >= goal for member in others))
        lab.heal(away, others)
        await lab.until(lambda: any(event == "resynced" for event, _ in away[0].events))
        adopted = [update for update in away[0].all_updates if update.record is None]
        assert adopted
        for update in adopted:
            assert set(update.state) == {"exp_avg", "exp_avg_sq"} < update.channels

    manifest = terms("des_loc").changed(
        exchange={"kind": "gather"}, outer={"first_moment": 1, "second_moment": 1}, inner={"steps": 4}
    )
    run_lab(manifest, script, make_model=two_blocks)
