"""Rounds of eight peers' frames under a rule: the same bits however they were read, and liars that are borne."""

from __future__ import annotations

import pytest
import torch

from decentral.compressors import parse_compressor
from decentral.consensus.chain import Head
from decentral.optimizers import aggregation_names, make_aggregation
from decentral.optimizers.aggregation.base import clip_scales, norm
from decentral.optimizers.shared_moments import DESLoc
from decentral.replica.apply import outer_step, reader_of
from decentral.replica.codec import Codec
from decentral.replica.reduction import Reduction
from decentral.rounds.frame_io import Inbox
from decentral.tensors.ops import float32
from decentral.wire.messages import FrameRef, ReducePlan
from tests.kit.aggregated import NUMEL, PEERS, SCHEMA, SPARSE, randn, replica, round_of
from tests.kit.tables import AGGREGATIONS, TRUSTS, long_but, rule_of

FLIPPERS = (2, 5)
FEW = ("mean", "norm_clip", "krum", "arc", "median")  # of each kind of look at what came
RULES = [
    spelling for spelling in AGGREGATIONS if "f=2" in spelling or spelling in ("rfa", "centered_clip", "norm_clip")
]


@pytest.mark.parametrize("spelling", long_but(FEW, aggregation_names()))
@pytest.mark.parametrize("chain", [SPARSE, "int8(block=64)"])
def test_a_step_has_the_same_bits_however_much_was_kept_of_what_arrived(chain: str, spelling: str):
    given = replica(rule_of(spelling), chain)
    record, frames = round_of(given.codec, [randn(n) for n in range(8)])
    alone = outer_step(given, record, frames).digest
    arriving = replica(rule_of(spelling), chain)
    inbox = Inbox(SCHEMA, arriving.codec, arriving.merge_codec, unpacked=arriving.contents.unpacked)
    head = Head(bytes(32), 0, 0, 0, bytes(32), bytes(32), PEERS)
    for frame in list(frames.values())[:5]:  # the others are read when the step is made
        inbox.check(frame.data, head)
        assert arriving.contents.unpacked.get(frame) is not None
    assert outer_step(arriving, record, frames).digest == alone
    assert outer_step(given, record, frames).digest == alone


@pytest.mark.parametrize("spelling", ["norm_clip", "rfa", "krum f=2", "nnm f=2", "caf f=2"])
def test_the_step_is_along_the_mixture_that_the_rule_makes_of_what_arrived(spelling: str):
    given = replica(rule_of(spelling), SPARSE)
    record, frames = round_of(given.codec, [randn(n) for n in range(8)])
    scales = reader_of(given).scales(list(frames.values()), [1.0] * 8, record.hash)
    rows = [given.codec.decompress(given.contents.payloads(frame)).double() for frame in frames.values()]
    wanted_N = sum(float32(scale) * row_N for scale, row_N in zip(scales, rows, strict=True)) / 8
    torch.testing.assert_close(-outer_step(given, record, frames).after_N.double(), wanted_N, rtol=1e-5, atol=1e-6)


def test_a_groups_lot_is_drawn_by_the_record():
    given = replica(make_aggregation("bucketing", {"f": 1, "size": 2, "then": "krum"}), "none")
    sent = [randn(n) for n in range(8)]
    steps = [outer_step(given, *round_of(given.codec, sent, number=number)).digest for number in range(4)]
    assert len(set(steps)) > 1


def test_states_beside_the_change_are_averaged_whatever_the_rule():
    moments = [torch.ones(NUMEL), torch.ones(NUMEL)]
    taken = {}
    for name in ("mean", "krum", "median"):
        given = replica(make_aggregation(name, {}), "none", DESLoc)
        record, frames = round_of(given.codec, [randn(n) for n in range(8)], moments, number=5)
        step = outer_step(given, record, frames)
        taken[name] = step.after_N
        torch.testing.assert_close(step.state["exp_avg"], torch.ones(NUMEL))
    assert not torch.equal(taken["mean"], taken["krum"])
    torch.testing.assert_close(
        -taken["median"], torch.stack([randn(n) for n in range(8)]).double().quantile(0.5, 0).float()
    )


def distance_after(spelling: str, chain: str, rounds: int = 40) -> float:
    """From the targets' mean, in units of their spread, when two of eight peers send ten times the opposite."""
    given = replica(rule_of(spelling), chain)
    goal_N = 3.0 * randn(100)
    targets = [goal_N + 0.1 * randn(n) for n in range(8)]
    for number in range(rounds):
        changes = [0.3 * (given.anchors[0] - target_N) for target_N in targets]
        sent = [-10.0 * change_N if n in FLIPPERS else change_N for n, change_N in enumerate(changes)]
        given.install(outer_step(given, *round_of(given.codec, sent, number=number)))
    honest_N = torch.stack([target_N for n, target_N in enumerate(targets) if n not in FLIPPERS]).mean(0)
    return float((given.anchors[0] - honest_N).norm() / (0.1 * randn(0)).norm())


@pytest.mark.parametrize("spelling", long_but(("norm_clip", "rfa", "krum f=2"), RULES))
def test_two_of_eight_that_send_ten_times_the_opposite_are_borne(spelling: str):
    assert spelling.split()[0] not in TRUSTS
    assert distance_after(spelling, "none") < 2.0


def test_the_mean_runs_away_from_two_of_eight():
    assert distance_after("mean", "none") > 1e3


@pytest.mark.parametrize("spelling", long_but(("krum f=2",), ["rfa", "krum f=2", "nnm f=2", "mda f=2"]))
def test_sparse_frames_bear_it_as_well(spelling: str):
    """A sixteenth of the values is sent in a round; the anchor begins 30 spreads away."""
    assert distance_after(spelling, "topk(k=256, chunk=4096)", 60) < 10.0


def test_under_the_median_clip_two_contributors_are_summed_as_ever() -> None:
    for rule, lengths in (("norm_clip", (1.0, 1e5)), ("mean", (1.0, 1e5, 2.0))):
        clipped, plain = replica(rule_of(rule), "int8"), replica(rule_of("mean"), "int8")
        record, frames = round_of(clipped.codec, [length * randn(n) for n, length in enumerate(lengths)])
        assert outer_step(clipped, record, frames).digest == outer_step(plain, record, frames).digest
    record, frames = round_of(clipped.codec, [length * randn(n) for n, length in enumerate((1.0, 1e5, 2.0))])
    clipped = replica(rule_of("norm_clip"), "int8")
    assert outer_step(clipped, record, frames).digest != outer_step(plain, record, frames).digest


def test_an_owner_of_a_reduce_clips_its_part_by_the_slices() -> None:
    codec = Codec(parse_compressor("none"))
    refs = tuple(FrameRef(peer, bytes(32), 0, 30, 30) for peer in PEERS[:3])
    plan = ReducePlan(0, 1, 0, 0, refs, ((PEERS[0], 0, NUMEL),))
    slices = [length * randn(n) for n, length in enumerate((1.0, 1e5, 2.0))]
    reduction = Reduction(plan, 0, dict(zip(PEERS, slices, strict=False)))
    scales = clip_scales([norm(one) for one in slices])
    mean = codec.decode(reduction.result(codec, [1.0] * 3, scales=scales).body, ((NUMEL,),))
    assert norm(mean) < 3.0 * norm(slices[0])
