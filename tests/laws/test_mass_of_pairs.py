"""What both of a pair learnt and owed moves their sum, by the method's equation, and nothing else does.

The pulls towards the pair's mean cancel, whatever a compressor makes of the replicas. What it loses of a change is owed
where there are debts, and is bounded where there are none; a change that stays at home is whole. The equations are
those that simulated pairs are judged by, once more in float64 and apart from the methods.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from decentral.compressors import parse_compressor, parse_feedback
from decentral.errors import ConfigError
from decentral.manifest import check_methods, preset_manifest
from decentral.optimizers import OuterMethod
from decentral.replica.codec import Codec
from decentral.simulate.equations import NOT_LINEAR, PULLS, Stood
from tests.kit.learners import Learners
from tests.kit.replicas import NUMEL, changed_books
from tests.kit.tables import topology_of
from tests.laws.bounds import BOUNDS, name_of

# Shape suffix: N = elements of the one fragment; float64.

PLACES = (slice(0, 960), slice(960, NUMEL))  # of the two tensors
ORDERS = [(0, 1, 2), (2, 0, 1), (1, 2, 0), (0, 1, 2), (2, 1, 0)]  # the first two of each are a pair, the last is alone
DEBTS = "ef(beta=1.0)"
in_pairs_with_an_equation = pytest.mark.methods(
    lambda spelling: topology_of(spelling) == "pair" and spelling.split()[0] in PULLS
)


def codecs(name: str) -> list[Codec]:
    """The preset's, and the same with debts where a run takes them."""
    manifests = [preset_manifest(name), preset_manifest(name, compressor={"feedback": DEBTS})]
    return [
        Codec(parse_compressor(one.compressor.chain), parse_feedback(one.compressor.feedback))
        for one in manifests
        if _accepted(one)
    ]


def _accepted(manifest) -> bool:
    try:
        check_methods(manifest)
    except ConfigError:
        return False
    return True


@dataclasses.dataclass(frozen=True)
class Before:
    """Where a peer stood before it swapped."""

    anchor_N: Tensor
    change_N: Tensor  # as the method has it
    state: Mapping[str, Tensor]
    books: Mapping[str, Tensor]


def before_of(run: Learners, n: int) -> Before:
    peer, replica = run.peers[n], run.peers[n].replica
    change_N = run.method.contribute(peer.anchor_N, peer.live_N)
    return Before(peer.anchor_N, change_N, dict(replica.states[0]), dict(replica.feedback[0]))


@in_pairs_with_an_equation
def test_a_pair_moves_by_what_both_learnt_and_owed_and_by_nothing_else(outer: OuterMethod):
    for codec in codecs(outer.name):
        run = Learners(outer, 3, torch.randn(NUMEL, generator=torch.Generator().manual_seed(9)), codec)
        for number, order in enumerate(ORDERS):
            random = torch.Generator().manual_seed(number)
            run.learn({n: 0.01 * torch.randn(NUMEL, generator=random) + 0.005 for n in order})
            before = {n: before_of(run, n) for n in order}
            run.meet(order)
            for group in (order[:2], order[2:]):
                check_kept(run, {n: before[n] for n in group})


def check_kept(run: Learners, group: Mapping[int, Before]) -> None:
    moved_N = sum(run.peers[n].anchor_N.double() - one.anchor_N.double() for n, one in group.items())
    told_N = sum(told_by(run, n, one) for n, one in group.items())
    off_N, most_N = (moved_N - told_N), sum(lost_at_most(run, one, len(group)) for one in group.values())
    if run.method.name in NOT_LINEAR:  # of a matrix the sum is kept, and no single value
        off_N, most_N = torch.cat([off_N[PLACES[0]].mean(0, keepdim=True), off_N[PLACES[1]]]), 0.0
    size = max(float(one.anchor_N.abs().max()) for one in group.values())
    assert float((off_N.abs() - most_N).max()) <= 1e-6 * size


def told_by(run: Learners, n: int, one: Before) -> Tensor:
    """The move of one of them without its pull, of what it sent as its books have it."""
    sent_N = changed_books(run.codec.feedback, one.change_N, one.books, run.peers[n].replica.feedback[0])
    stood = Stood(one.anchor_N.double(), sent_N, {name: held_N.double() for name, held_N in one.state.items()})
    return PULLS[run.method.name](stood, dataclasses.asdict(run.method))  # type: ignore[call-overload]  # a dataclass


def lost_at_most(run: Learners, one: Before, peers: int) -> Tensor | float:
    """Of a change that is sent, and that nobody owes for."""
    if peers == 1 or run.codec.feedback.sender or run.method.channels()[0].is_replica:
        return 0.0
    bound = BOUNDS[name_of(str(run.codec.compressor))].per_value
    assert bound is not None
    return run.method.beta * bound(run.codec.compressor, one.change_N.double())  # type: ignore[attr-defined]
