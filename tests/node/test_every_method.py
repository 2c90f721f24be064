"""Peers of every method meet in real rounds: commits are made, and all hold the same bits, their states, too."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from decentral.consensus import leader
from decentral.consensus.chain import contributions
from decentral.consensus.round_state import RoundState
from decentral.manifest import Manifest
from decentral.observe.health import Notices
from decentral.optimizers import make_outer, presets
from decentral.replica.apply import round_info
from decentral.replica.contribution import Contribution
from decentral.replica.replica import OWED
from decentral.replica.weights import NOBODY
from decentral.wire.frames import FrameKind
from decentral.wire.messages import Offer
from tests.kit.blocks import InTurns, check_alike, states_of, two_blocks
from tests.kit.gossip_learners import Learner
from tests.kit.liars import acting_as
from tests.kit.nodes import Lab, Member, scene, small_terms, tiny_model
from tests.kit.partitions import exact_terms, settle
from tests.kit.tables import SYNCHRONOUS_WIRES, covering

SYNCHRONOUS = [name for name in presets() if make_outer(name, {}).topology == "all"]
PRODUCT = tuple(itertools.product(SYNCHRONOUS, ("gather", "reduce")))
QUICK = set(covering(SYNCHRONOUS_WIRES))
TURNS = [
    pytest.param(*one, marks=[] if one[0] in QUICK and n % 4 in (0, 3) else [pytest.mark.long])
    for n, one in enumerate(PRODUCT)
]
TOPK = {"chain": "topk(k=16, chunk=4096)", "feedback": "ef(beta=0.95)"}


async def meet_alike(lab: Lab) -> None:
    """Eight rounds, after which all stand at one head with the same bits; nobody dropped a frame."""
    await lab.rounds(8)
    await lab.rest()
    await lab.one_head()
    check_alike(lab.members)
    assert not [member for member in lab.members if member.happened("dropped")]


@pytest.mark.parametrize(("method", "exchange"), TURNS)  # of each kind of method one exchange, and the rest is long
@scene(
    lambda method, exchange: small_terms(method).changed(
        exchange={"kind": exchange},
        compressor={"chain": "bf16", "feedback": "none"},
        outer={"norm_clip": None, "fragments": 2, "overlap": 0},
        inner={"steps": 8},
    ),
    peers=[InTurns] * 3,
    make_model=two_blocks,
)
async def test_rounds_are_made_and_all_hold_the_same_bits(lab: Lab, method: str, exchange: str) -> None:
    await meet_alike(lab)


PERIODS = {"des_loc": {"first_moment": 1, "second_moment": 2}, "mt_dao": {"slow": 1, "variance": 2}}


@pytest.mark.parametrize("method", PERIODS)
@pytest.mark.parametrize(
    ("exchange", "chain"),
    [
        ("gather", "topk(k=16, chunk=256) >> signmag2"),
        ("reduce", "topk(k=16, chunk=256)"),
        ("reduce", "int8(block=64)"),
    ],
)
@scene(
    lambda method, exchange, chain: small_terms(method).changed(
        exchange={"kind": exchange},
        compressor={"chain": chain, "feedback": "ef(beta=0.95)"},
        outer={"norm_clip": None, "overlap": 0, **PERIODS[method]},
        inner={"steps": 4},
    ),
    peers=[InTurns] * 3,
    make_model=two_blocks,
)
async def test_moments_with_a_compressor_of_their_own_are_averaged_alike_everywhere(
    lab: Lab, method: str, exchange: str, chain: str
) -> None:
    await meet_alike(lab)
    assert len({member.node.replica.digest for member in lab.members}) == 1
    assert str(lab.members[0].node.replica.codec.beside) == "bf16"
    assert all(one.any() for one in states_of(lab.members[0]).values())


@pytest.mark.parametrize("preset", ["des_loc", "delayed_nesterov"])
@scene(peers=2, rounds=4)
async def test_a_method_with_channels_or_turns_of_its_own_knows_the_outer_step_of_each_record(
    lab: Lab, preset: str
) -> None:
    records = [commit.record for commit in lab.members[0].log if commit.record.frames]
    replica = lab.members[0].node.replica
    infos = [round_info(replica, record, [1.0] * len(record.contributors or record.frames)) for record in records]
    assert [info.step for info in infos] == list(range(len(infos)))
    assert {one.age for info in infos for one in info.contributors} == {0}
    lab.check_equal()


def mt_dao(exchange: str) -> Manifest:
    return small_terms("mt_dao").changed(exchange={"kind": exchange}, compressor=TOPK, inner={"steps": 4})


@scene(lambda: mt_dao("reduce"), peers=[InTurns] * 2, make_model=two_blocks)
async def test_an_offer_of_a_reduce_says_what_the_moments_take_too(lab: Lab) -> None:
    """The size is what the others' patience is reckoned from."""
    offers: list[Offer] = []
    for member in lab.members:
        machine = member.node.driver.state.machine
        machine.offer = _told_to(offers, machine.offer)  # type: ignore[method-assign]
    await lab.rounds(3)
    assert offers
    assert min(offer.nbytes for offer in offers) > 2 * 2 * lab.members[0].node.replica.numel(0)


def _told_to(offers: list[Offer], offer: Any) -> Any:
    def told(made: Offer, now: float) -> Any:
        offers.append(made)
        return offer(made, now)

    return told


@scene(lambda: mt_dao("gather"), peers=[InTurns] * 3, rounds=3, make_model=two_blocks)
async def test_catching_up_by_frames_counts_the_moments_in_them(lab: Lab) -> None:
    """A sparse change beside whole moments: three take more than a snapshot, and looked like a third."""
    member = lab.members[0]
    commit = next(commit for commit in reversed(member.log) if len(commit.record.frames) == 3)
    unknown = tuple(replace(ref, frame=ref.peer) for ref in commit.record.frames)
    missed = replace(commit, record=replace(commit.record, frames=unknown))
    assert not member.node.catch_up.is_cheap([missed])
    assert member.node.catch_up.is_cheap([commit])  # whose frames are here


@scene(
    lambda: small_terms("des_loc").changed(
        exchange={"kind": "gather"}, outer={"first_moment": 1, "second_moment": 1}, inner={"steps": 4}
    ),
    peers=[InTurns] * 3,
    make_model=two_blocks,
)
async def test_an_adopted_snapshot_brings_the_shared_moments_to_the_inner_optimizer(lab: Lab) -> None:
    *others, away = lab.members
    for member in others:
        member.node.driver.state.store.capacity = 1  # as with a large model: only the newest frame stays
    lab.cut([away], others)
    await lab.reach(others, others[0].rounds + 4)
    lab.heal([away], others)
    await lab.until(lambda: away.happened("resynced"))
    adopted = [update for update in away.all_updates if update.record is None]
    assert adopted
    for update in adopted:
        assert set(update.state) == {"exp_avg", "exp_avg_sq"} < update.channels


# ---- what a run has no use for ----


def contributing(member: Member, change: Callable[[Contribution], None]) -> None:
    contribute = member.node.driver.contribute

    async def changed(made: Contribution) -> bool:
        change(made)
        return await contribute(made)

    member.node.driver.contribute = changed  # type: ignore[method-assign]


class Silent(InTurns):
    """Sends less than its round wants: no moments, and no zeros for them."""

    def __init__(self, lab: Lab, number: int, founder: bool) -> None:
        super().__init__(lab, number, founder)
        contributing(self, lambda made: setattr(made, "states", ()))


class Merging(Member):
    """Offers its parameters themselves, as at the end of a gossip run, where changes of them are due."""

    def __init__(self, lab: Lab, number: int, founder: bool) -> None:
        super().__init__(lab, number, founder)
        driver, replica = self.node.driver, self.node.replica

        def as_a_merge(made: Contribution) -> None:
            made.kind = FrameKind.MERGE
            made.encoded = replica.merge_codec.encode(made.local_N, {}, replica.shapes(made.fragment))
            machine, offer = driver.machine, type(driver.machine).offer
            machine.offer = lambda said, now: offer(machine, replace(said, nbytes=1), now)  # type: ignore[method-assign]

        contributing(self, as_a_merge)


BOTH_MOMENTS = {"outer": {"first_moment": 1, "second_moment": 1}, "inner": {"steps": 4}}


@pytest.mark.parametrize(
    ("preset", "tables", "exchange", "honest", "liar"),
    [
        ("des_loc", BOTH_MOMENTS, "gather", InTurns, Silent),
        ("des_loc", BOTH_MOMENTS, "reduce", InTurns, Silent),
        ("diloco", {}, "gather", Member, Merging),
    ],
)
@pytest.mark.parametrize("first", [0, 1, pytest.param(2, marks=pytest.mark.long)])
@scene(
    lambda preset, tables, exchange: small_terms(preset).changed(exchange={"kind": exchange}, **tables),
    make_model=two_blocks,
)
async def test_what_lacks_a_channel_or_is_of_another_kind_is_left_out_and_ends_nobody(
    lab: Lab, preset: str, tables: Any, exchange: str, honest: Any, liar: Any, first: int
) -> None:
    await lab.start([liar if number == first else honest for number in range(3)], rounds=3)
    member = lab.members[first]
    records = [commit.record for commit in member.log if len(commit.record.members) == 3]
    assert sum(bool(record.frames) for record in records) >= 3
    assert all(ref.peer != member.signer.peer for record in records for ref in contributions(record))


class Cutting(Member):
    """Proposes records whose ranges are none that results were made for."""

    async def _train(self) -> None:
        make = leader.make_record

        def cut(
            state: RoundState, now: float, frames: Any = (), contributors: Any = (), partition: Any = (), plan: int = 0
        ) -> Any:
            shorter = tuple((owner, start, stop - 1) for owner, start, stop in partition)
            return make(state, now, frames, contributors, shorter, plan)

        with acting_as(self.node.driver.state.me, leader, make_record=cut):
            await super()._train()


@scene("diloco", peers=[Member, Cutting, Member], rounds=6, make_model=tiny_model)
async def test_a_leader_whose_record_has_other_ranges_than_its_plan_finds_no_votes(lab: Lab) -> None:
    whole = sum(fragment.numel for fragment in lab.schema.fragments)
    records = [commit.record for commit in lab.members[0].log]
    assert any(record.partition for record in records)
    assert all(record.partition[-1][2] == whole for record in records if record.partition)


# ---- rounds in which some contributors count nothing, or none counts ----


class Wild(Learner):
    """Is an outlier once ``wild``."""

    wild = False

    def step(self) -> None:
        super().step()
        if self.wild:
            for fragment in range(len(self.moved)):
                self.model.write(fragment, self.model.read(fragment) * 1000 + 1000.0)


def edit_terms(compressor: dict[str, str], exchange: str) -> Manifest:
    found = exact_terms(small_terms, compressor, exchange)
    tables = found.model_dump()
    alike = {"relative_temperature": 1e30, "clip": 1e30}
    tables["outer"] = {"method": "edit", "learning_rate": 1.0, "momentum": 0.0, **alike}
    return found.of(tables, "terms")


def is_used_to(lab: Lab, norm: float) -> None:
    for member in lab.members:
        for state in member.node.replica.states:
            state["usual"] = torch.tensor([1000.0, norm, 1e-3 * norm * norm, 1.0])


@pytest.mark.parametrize("exchange", ["gather", "reduce"])
@scene(
    lambda exchange: edit_terms({"chain": "none", "feedback": "none"}, exchange),
    peers=[Learner] * 3,
    make_model=tiny_model,
)
async def test_a_round_in_which_nobody_counts_ends_and_moves_nothing(lab: Lab, exchange: str) -> None:
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


@scene(
    lambda: edit_terms({"chain": "topk(k=3, chunk=64)", "feedback": "ef(beta=1.0)"}, "reduce"),
    peers=[Wild] * 3,
    make_model=tiny_model,
)
async def test_who_counts_nothing_keeps_what_it_owes_of_elements_that_another_owns(lab: Lab) -> None:
    """Nothing times infinity ended its process, as any error does that is none of ours."""
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
    assert torch.equal(replica.owed_as_owner(0), owed_N)


# ---- rounds that go by time ----

STEPS = 100
PACES = (0.05, 0.05, 0.25)  # s per inner step


class Paced(Learner):
    """Makes as many inner steps as it can: some five times as many as others."""

    interval = STEPS

    def __init__(self, lab: Lab, number: int, founder: bool) -> None:
        super().__init__(lab, number, founder)
        self.pace = PACES[number]


@scene(
    lambda: small_terms("a_edit").changed(
        outer={"seconds": 2.0}, compressor={"chain": "bf16", "feedback": "none"}, inner={"steps": STEPS}
    ),
    peers=[Paced] * 3,
    rounds=6,
)
async def test_a_round_has_all_with_the_steps_that_each_made_in_the_time(lab: Lab) -> None:
    """By steps the slow one would hold up every round for 25 s, or be passed by."""
    numbers = {member.signer.peer: number for number, member in enumerate(lab.members)}
    rounds = [{numbers[ref.peer]: ref.steps for ref in contributions(commit.record)} for commit in lab.members[0].log]
    whole = [one for one in rounds if len(one) == len(PACES)]
    assert len(whole) >= 4
    for steps in whole[1:]:
        assert 35 <= min(steps[0], steps[1]) <= max(steps[0], steps[1]) <= 60
        assert 7 <= steps[2] <= 12
