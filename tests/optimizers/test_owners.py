"""The law of methods whose peers train parts: what a peer sends outside of what it says to own changes nothing."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
from torch import Tensor

from decentral.consensus.chain import contributions
from decentral.errors import ConfigError
from decentral.manifest import check_methods, preset_manifest
from decentral.optimizers import Contributor
from decentral.optimizers.base import OuterMethod, numel_of
from decentral.optimizers.owners import experts_of
from decentral.optimizers.partial_updates import PartialUpdates
from decentral.optimizers.spes import SPES
from decentral.replica.contribution import Contribution, encode_whole
from decentral.replica.reduction import Reduction
from decentral.wire.messages import FrameRef, ReducePlan
from tests.kit.blocks import InTurns
from tests.kit.learners import EXACT, Learners
from tests.kit.nodes import Lab
from tests.kit.replicas import NUMEL, SIGNERS
from tests.optimizers.owning import LAYOUT, mixture, randn, said, span

PEERS = (0, 1, 2)


class WithLiar(Learners):
    """Its peer 0 sends ``lie`` beside what it learnt."""

    lie_N = torch.zeros(NUMEL)

    def _taken(self, n: int, summary: bytes | None) -> Any:
        made = super()._taken(n, summary)
        if n == 0:
            made.sent_N = made.gradient_N + self.lie_N
            made.encoded = encode_whole(self.peers[0].replica, 0, made.gradient_N, made.states, SIGNERS[0].peer)
        return made


def after_three_rounds(method: PartialUpdates, lie: float) -> list[Tensor]:
    run = WithLiar(method, 3, randn(0))
    for number in range(3):
        (own,) = struct.unpack("<H", method.says(run.peers[0].schedule.live, 0, []))
        run.lie_N = torch.full((NUMEL,), lie)
        run.lie_N[span(method, own)] = 0.0
        run.learn({n: 0.01 * randn(10 * number + n) for n in PEERS})
        run.meet(PEERS, {0: struct.pack("<H", own)})
    return [peer.anchor_N for peer in run.peers]


@pytest.mark.parametrize("lie", [1.0, 3e38, -1e-40])
def test_in_a_gather_what_is_sent_outside_of_ones_slice_changes_nothing(lie: float):
    method = PartialUpdates(slices=3)
    told, honest = after_three_rounds(method, lie), after_three_rounds(method, 0.0)
    for one_N in told:
        assert torch.equal(one_N, honest[0])
    assert not torch.equal(honest[0], randn(0))


def test_in_a_reduce_the_owner_of_a_part_does_not_add_it():
    """The part begins and ends inside slices, and so do the ranges that count nothing."""
    peers = sorted(signer.peer for signer in SIGNERS[:3])
    refs = tuple(FrameRef(peer, bytes(32), 0, 1, 1, 0) for peer in peers)
    plan = ReducePlan(0, 1, 0, 0, refs, ((peers[0], 4, 16),))
    slices = {peer: randn(n, 12) for n, peer in enumerate(peers)}
    outside = [[(0, 5), (10, 20)], [(5, 10)], []]
    made = Reduction(plan, 0, slices).result(EXACT, [1.0, 2.0, 3.0], outside=outside)
    masked = [slices[peer].clone() for peer in peers]
    masked[0][:1] = masked[0][6:] = masked[1][1:6] = 0.0
    wanted_N = (masked[0] + 2.0 * masked[1] + 3.0 * masked[2]) / torch.tensor(6.0)
    assert torch.equal(EXACT.decompress(made.payloads, 1).flatten(), wanted_N)


def test_experts_of_others_are_outside_and_what_is_shared_is_nobodys():
    method, layers = SPES(), experts_of(LAYOUT)
    counts = torch.ones(numel_of(LAYOUT), dtype=torch.bool)
    for start, stop in method.outside(Contributor(bytes(32), summary=said(1, 3)), LAYOUT):
        counts[start:stop] = False
    for experts in layers.values():
        for expert, spans in experts.items():
            assert all(bool(counts[start:stop].all()) == (expert % 3 == 1) for start, stop in spans), expert
    shared = sum(parameter.numel() for name, parameter in mixture().named_parameters() if "experts" not in name)
    assert int(counts.sum()) > shared > 0
    assert list(method.outside(Contributor(bytes(32), summary=said(0, 1)), LAYOUT)) == []


@pytest.mark.parametrize("method", ["partial_updates", "spes"])
def test_what_would_be_owed_of_a_part_that_another_has_by_then_is_refused(method: str):
    check_methods(preset_manifest(method))
    for feedback in ("ef(beta=0.95)", "dgc"):
        with pytest.raises(ConfigError, match="its peers train different parts"):
            check_methods(preset_manifest(method, compressor={"feedback": feedback}))


def test_with_overlap_the_slice_that_was_trained_before_is_named_beside_the_own_and_counts():
    """Inner steps between a contribution and its commit are of the old slice; to leave them out would lose them."""
    method: OuterMethod = PartialUpdates(slices=4)
    run = Learners(method, 1, randn(0))
    live = run.peers[0].schedule.live
    live.own(0)["slice"] = torch.tensor([2.0])
    sent_N = torch.zeros(NUMEL)
    sent_N[span(PartialUpdates(slices=4), 2)] = 1.0
    assert method.says(live, 0, [sent_N]) == struct.pack("<H", 2)
    sent_N[span(PartialUpdates(slices=4), 1)] = 1.0
    assert method.says(live, 0, [sent_N]) == struct.pack("<HH", 2, 1)
    layout = live.layout(0)
    spans = method.outside(Contributor(bytes(32), summary=struct.pack("<HH", 2, 1)), layout)
    assert list(spans) == [(0, NUMEL // 4), (NUMEL * 3 // 4, NUMEL)]


class Lying(InTurns):
    """A peer in real rounds that adds a million to all that it does not own."""

    def __init__(self, lab: Lab, number: int, founder: bool) -> None:
        super().__init__(lab, number, founder)
        honest, method = self.node.driver.contribute, self.node.replica.method

        async def contribute(made: Contribution) -> bool:
            said = Contributor(self.signer.peer, summary=made.summary)
            lie_N = torch.zeros_like(made.gradient_N)
            for start, stop in method.outside(said, self.schedule.live.layout(made.fragment)):
                lie_N[start:stop] = 1e6
            assert lie_N.any()
            made.sent_N = made.gradient_N + lie_N
            return await honest(made)

        self.node.driver.contribute = contribute  # type: ignore[method-assign]


@pytest.mark.parametrize("exchange", ["gather", "reduce"])
def test_in_real_rounds_no_anchor_has_anything_of_a_lie(run_lab: Any, terms: Any, exchange: str) -> None:
    async def script(lab: Lab) -> None:
        for kind in (InTurns, InTurns, Lying):
            lab.add(kind=kind)
        await lab.all_members()
        await lab.rounds(6)
        for member in lab.members[:2]:
            assert float(member.node.replica.anchors[0].abs().max()) < 1e5
        named = [ref.peer for commit in lab.members[0].log for ref in contributions(commit.record)]
        assert named.count(lab.members[2].signer.peer) >= 3

    changed = {"inner": {"steps": 4}, "compressor": {"chain": "none"}, "exchange": {"kind": exchange}}
    run_lab(terms("partial_updates").changed(**changed), script)
