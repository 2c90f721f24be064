"""Three peers that train under a manifest with [outer.aggregation]: rounds are made, and all hold the same bits."""

from __future__ import annotations

import functools
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
from tests.kit.nodes import Lab, Member, run_in_lab, scene, small_terms, tiny_model
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


def run(kinds: Sequence[type[Learner]], rule: dict[str, Any] | None, **tables: Any) -> float:
    """The length of the anchor after some rounds that began at zero."""
    seen: list[float] = []

    async def script(lab: Lab) -> None:
        await lab.start(kinds)
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
    manifest = small_terms("sparseloco").changed(inner={"steps": 4}, outer=outer, **tables)
    check_methods(manifest)
    run_in_lab(manifest, script, make_model=tiny_model)
    return seen[0]


@functools.cache
def honest(chain: str, exchange: str = "gather") -> float:
    """The same of three that all learn."""
    (compressor,) = (one for one in (SPARSE, DENSE) if one["chain"] == chain)
    return run([Learner] * 3, None, compressor=compressor, exchange={"kind": exchange})


def of_rules(*rows: tuple[dict[str, Any], dict[str, str], str]) -> list[Any]:  # Any: as tables.long_but
    """Of rules that are measured alike one is in ``make test``."""
    long = ("rfa", "nnm")
    marks = {name: [pytest.mark.long] for name in long}
    return [pytest.param(*row, id=f"{row[0]['rule']} {row[2]}", marks=marks.get(row[0]["rule"], [])) for row in rows]


@pytest.mark.parametrize(
    ("rule", "compressor", "exchange"),
    of_rules(
        ({"rule": "rfa"}, SPARSE, "gather"),
        ({"rule": "krum"}, SPARSE, "gather"),  # of three it cannot choose: they are shortened
        ({"rule": "nnm", "then": "centered_clip(iterations=3)"}, SPARSE, "gather"),
        ({"rule": "trimmed_mean", "f": 1}, DENSE, "gather"),
        ({"rule": "arc", "f": 1, "then": "mean"}, DENSE, "reduce"),  # owners shorten by the norms of their parts
    ),
)
def test_three_peers_agree_and_one_of_them_may_learn_nonsense(
    rule: dict[str, Any], compressor: dict[str, str], exchange: str
) -> None:
    borne = run([Learner, Learner, Wild], rule, compressor=compressor, exchange={"kind": exchange})
    assert 0 < borne < 10 * honest(compressor["chain"], exchange)


def test_the_mean_follows_whoever_learns_nonsense() -> None:
    assert run([Learner, Learner, Wild], {"rule": "mean"}, compressor=DENSE) > 1e3 * honest(DENSE["chain"])


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


def wide_enough() -> torch.nn.Module:
    """Each of three owns a part of a reduce: they are cut at multiples of 4096."""
    return torch.nn.Linear(128, 128)


@pytest.mark.parametrize("exchange", ["reduce", "gather"])
@scene(
    lambda exchange: small_terms("edit").changed(outer={"clip": 1e9}, exchange={"kind": exchange}),
    peers=(None, None, Modest),
    rounds=5,
    make_model=wide_enough,
)
async def test_who_sends_far_too_much_and_states_a_small_norm_does_not_move_edit(lab: Lab, exchange: str) -> None:
    """The other two are 67 long; one step to the third would be 20,000."""
    lab.check_equal()
    assert float(lab.members[0].node.replica.anchors[0].norm()) < 200.0
    last = [commit.record for commit in lab.members[0].log if commit.record.frames][-1]
    assert len(contributions(last)) == 3
    assert bool(last.partition) == (exchange == "reduce")
