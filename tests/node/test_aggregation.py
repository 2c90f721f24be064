"""Three peers that train under a manifest with [outer.aggregation]: rounds are made, and all hold the same bits."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest
import torch

from decentral.consensus.chain import contributions
from decentral.manifest import check_methods
from decentral.optimizers.base import Live
from decentral.optimizers.edit import EDiT
from tests.kit.gossip_learners import Learner
from tests.kit.nodes import Lab, Member, tiny_model
from tests.kit.partitions import settle

SPARSE = {"chain": "topk(k=64, chunk=4096) >> signmag2", "feedback": "ef(beta=0.95)"}
DENSE = {"chain": "int8(block=64)", "feedback": "none"}


class Wild(Learner):
    """Learns a million times what the others do, in another direction."""

    def step(self) -> None:
        before = [self.model.read(fragment) for fragment in range(len(self.moved))]
        super().step()
        for fragment, before_N in enumerate(before):
            self.model.write(fragment, before_N - 1e6 * (self.model.read(fragment) - before_N))


def run(run_lab: Any, terms: Any, kinds: list[type[Learner]], rule: dict[str, Any] | None, **tables: Any) -> float:
    """The length of the anchor after some rounds that began at zero."""
    seen: list[float] = []

    async def script(lab: Lab) -> None:
        for kind in kinds:
            lab.add(kind=kind)
        await settle(lab)
        for member in lab.members:
            member.idle = False
        await lab.rounds(6)
        await settle(lab)
        lab.check_equal()
        first, *others = [member.node.replica.anchors[0] for member in lab.members]
        assert all(torch.equal(first, other) for other in others)
        seen.append(float(first.norm()))

    outer = {"norm_clip": None, "aggregation": rule}
    manifest = terms("sparseloco").changed(inner={"steps": 4}, outer=outer, **tables)
    check_methods(manifest)
    run_lab(manifest, script, make_model=tiny_model)
    return seen[0]


@pytest.mark.parametrize(
    ("rule", "compressor"),
    [
        ({"rule": "rfa"}, SPARSE),
        ({"rule": "krum"}, SPARSE),  # of three it cannot choose: they are shortened
        ({"rule": "nnm", "then": "centered_clip(iterations=3)"}, SPARSE),
        ({"rule": "bucketing", "size": 1}, SPARSE),
        ({"rule": "median"}, DENSE),
        ({"rule": "trimmed_mean", "f": 1}, DENSE),
    ],
    ids=lambda one: one.get("rule", ""),
)
def test_three_peers_agree_and_one_of_them_may_learn_nonsense(
    run_lab: Any, terms: Any, rule: dict[str, Any], compressor: dict[str, str]
) -> None:
    honest = run(run_lab, terms, [Learner] * 3, None, compressor=compressor)
    borne = run(run_lab, terms, [Learner, Learner, Wild], rule, compressor=compressor)
    assert 0 < borne < 10 * honest


def test_the_mean_follows_whoever_learns_nonsense(run_lab: Any, terms: Any) -> None:
    honest = run(run_lab, terms, [Learner] * 3, None, compressor=DENSE)
    assert run(run_lab, terms, [Learner, Learner, Wild], {"rule": "mean"}, compressor=DENSE) > 1e3 * honest


def test_owners_of_a_reduce_shorten_by_the_norms_of_their_parts(run_lab: Any, terms: Any) -> None:
    tables = {"compressor": DENSE, "exchange": {"kind": "reduce"}}
    honest = run(run_lab, terms, [Learner] * 3, None, **tables)
    borne = run(run_lab, terms, [Learner, Learner, Wild], {"rule": "arc", "f": 1, "then": "mean"}, **tables)
    assert 0 < borne < 10 * honest


class Understates(EDiT):
    """States next to no norm, whatever it sends."""

    def says(self, live: Live, fragment: int, sent: Sequence[torch.Tensor]) -> bytes:
        return struct.pack("<d", 1e-300)


class Modest(Member):
    """Sends a thousand times what the others do, and says that it is nothing."""

    def __init__(self, lab: Lab, number: int, founder: bool) -> None:
        super().__init__(lab, number, founder)
        own = self.node.replica.method
        assert isinstance(own, EDiT)
        self.node.replica.method = Understates(**asdict(own))

    def target(self, fragment: int) -> torch.Tensor:
        return 1e3 * super().target(fragment)


@pytest.mark.parametrize("exchange", ["reduce", "gather"])
def test_who_sends_far_too_much_and_states_a_small_norm_does_not_move_edit(
    run_lab: Any, terms: Any, exchange: str
) -> None:
    """The other two are 67 long; one step to the third would be 20,000."""

    async def script(lab: Lab) -> None:
        for kind in (None, None, Modest):
            lab.add(kind=kind)
        await lab.all_members()
        await lab.rounds(5)
        lab.check_equal()
        assert float(lab.members[0].node.replica.anchors[0].norm()) < 200.0
        last = [commit.record for commit in lab.members[0].log if commit.record.frames][-1]
        assert len(contributions(last)) == 3
        assert bool(last.partition) == (exchange == "reduce")

    outer = {"clip": 1e9}
    run_lab(terms("edit").changed(outer=outer, exchange={"kind": exchange}), script, make_model=wide_enough)


def wide_enough() -> torch.nn.Module:
    """Each of three owns a part of a reduce: they are cut at multiples of 4096."""
    return torch.nn.Linear(128, 128)
