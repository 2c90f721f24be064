"""What a pair's disagreement is measured on, and what stays exact at home."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest
import torch
from torch import Tensor

from decentral.compressors import parse_compressor
from decentral.optimizers import CHANGE, Channel, OuterMethod, make_outer
from decentral.parameters import schema_of
from decentral.replica.codec import Codec
from decentral.replica.contribution import Contribution
from decentral.replica.pair_step import encode_half, step_alone, step_together
from decentral.replica.replica import Replica

NUMEL = 200
PARAMETERS = {"weight": torch.zeros(NUMEL, requires_grad=True)}


@dataclass(frozen=True, slots=True)
class _Kept(OuterMethod):
    """Nothing moves."""

    name: ClassVar[str] = "kept"
    topology: ClassVar[Literal["all", "pair"]] = "pair"

    def outer_step(self, anchor, received, state, info):
        return anchor.clone(), {}


@dataclass(frozen=True, slots=True)
class FlowAlone(_Kept):
    """Sends its change, and nothing that stands for its parameters."""


@dataclass(frozen=True, slots=True)
class MomentLast(_Kept):
    """Sends its parameters, and an inner moment behind them."""

    def channels(self):
        return CHANGE, Channel("slow", combine="each", is_replica=True), Channel("exp_avg")


def replica_of(method: OuterMethod, seed: int, chain: str = "none") -> Replica:
    codec = Codec(parse_compressor(chain))
    return Replica(schema_of(PARAMETERS), [drawn(seed)], method, codec, codec)


def drawn(seed: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def made_of(change_N: Tensor, states: tuple[Tensor, ...] = ()) -> Contribution:
    return Contribution(0, b"", change_N, change_N, 1, 1, states=states)


def met(method: OuterMethod, changes: list[Tensor], states: list[tuple[Tensor, ...]], chain: str = "none"):
    peers = [replica_of(method, seed, chain) for seed in range(2)]
    made = list(map(made_of, changes, states))
    halves = list(map(encode_half, peers, made))
    return [
        step_together(peer, 0, mine, mine_CN, theirs_CN.flatten())
        for peer, mine, mine_CN, theirs_CN in zip(peers, made, halves, reversed(halves), strict=True)
    ]


def rms(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / ours.norm())


def test_of_a_method_with_one_vector_it_is_that_of_where_both_would_go_alone():
    first, _ = met(make_outer("gasloc", {"lr": 0.5}), [drawn(2), drawn(3)], [(), ()])
    p, q = drawn(0) - 0.5 * drawn(2), drawn(1) - 0.5 * drawn(3)
    assert first.disagreement == pytest.approx(rms(p, q), rel=1e-6)


def test_of_equal_replicas_that_learnt_the_same_it_is_0():
    one = replica_of(make_outer("ad_psgd", {}), 0)
    mine = made_of(drawn(2))
    mine_CN = encode_half(one, mine)
    assert step_together(one, 0, mine, mine_CN, mine_CN.flatten()).disagreement == 0.0


def test_it_is_of_the_parameters_whatever_channel_is_behind_them():
    moments = [(drawn(0), torch.zeros(NUMEL)), (drawn(1), 100 * drawn(5))]
    first, _ = met(MomentLast(), [drawn(2), drawn(3)], moments)
    assert first.disagreement == pytest.approx(rms(drawn(0), drawn(1)), rel=1e-6)


def test_channels_with_a_compressor_of_their_own_reach_the_partner_by_it():
    sparse, own = parse_compressor("topk(k=4, chunk=64)"), parse_compressor("bf16")
    peers = [replica_of(MomentLast(), seed) for seed in range(2)]
    for peer in peers:
        peer.codec = Codec(sparse, beside=own)
    made = [made_of(drawn(2 + n), (drawn(n), drawn(5 + n))) for n in range(2)]
    halves = list(map(encode_half, peers, made))
    for n, (mine, mine_CN) in enumerate(zip(made, halves, strict=True)):
        came_CN = peers[0].codec.decode(mine.encoded.body, ((NUMEL,),) * 3, 3).view(3, -1)
        assert torch.equal(came_CN, mine_CN)
        assert int((came_CN[0] != 0).sum()) <= 4 * 4
        torch.testing.assert_close(came_CN[1:], torch.stack([drawn(n), drawn(5 + n)]), rtol=2**-8, atol=0)
    first = step_together(peers[0], 0, made[0], halves[0], halves[1].flatten())
    assert first.disagreement == pytest.approx(rms(drawn(0), drawn(1)), rel=1e-2)


def test_of_a_method_that_sends_no_parameters_nobody_knows_it():
    first, _ = met(FlowAlone(), [drawn(2), drawn(3)], [(), ()])
    assert first.disagreement is None


@pytest.mark.parametrize("name", ["gasloc", "ad_psgd", "a2cid2", "late_merge"])
@pytest.mark.parametrize("chain", ["fp16", "int8(block=4096)"])
def test_no_compressor_touches_what_a_peer_learnt_where_the_change_stays_at_home(name: str, chain: str):
    """The sum of a pair moves as if nothing had been compressed, with steps far below what fp16 resolves of weights."""
    method = make_outer(name, {})
    changes = [1e-5 * drawn(2), 1e-5 * drawn(3)]
    whole, coarse = (met(method, changes, [(), ()], how) for how in ("none", chain))
    moved = [sum(one.after_N.double() - one.before_N.double() for one in steps) for steps in (whole, coarse)]
    torch.testing.assert_close(moved[1], moved[0], rtol=0, atol=2e-6)
    assert not any(one.feedback for one in coarse)


def test_a_peer_alone_steps_from_its_own_change():
    one = replica_of(make_outer("ad_psgd", {}), 0, "fp16")
    step = step_alone(one, 0, made_of(drawn(2)))
    assert torch.equal(step.after_N, drawn(0) - drawn(2))
    assert step.disagreement is None
