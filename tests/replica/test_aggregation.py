"""Rounds of eight peers' frames under a rule: the same bits however they were read, and liars that are borne."""

from __future__ import annotations

import pytest
import torch

from decentral.consensus.chain import Head
from decentral.optimizers import aggregation_names, make_aggregation
from decentral.optimizers.shared_moments import DESLoc
from decentral.replica.apply import outer_step, reader_of
from decentral.rounds.inbox import Inbox
from decentral.tensors.ops import float32
from tests.kit.aggregated import NUMEL, PEERS, SCHEMA, SPARSE, randn, replica, round_of
from tests.kit.tables import AGGREGATIONS, TRUSTS, rule_of

FLIPPERS = (2, 5)
RULES = [
    spelling for spelling in AGGREGATIONS if "f=2" in spelling or spelling in ("rfa", "centered_clip", "norm_clip")
]


@pytest.mark.parametrize("spelling", aggregation_names())
@pytest.mark.parametrize("chain", [SPARSE, "int8(block=64)"])
def test_a_step_has_the_same_bits_however_much_was_kept_of_what_arrived(chain: str, spelling: str):
    given = replica(rule_of(spelling), chain)
    record, frames = round_of(given.codec, [randn(n) for n in range(8)])
    alone = outer_step(given, record, frames).digest
    arriving = replica(rule_of(spelling), chain)
    inbox = Inbox(SCHEMA, arriving.codec, arriving.merge_codec, unpacked=arriving.contents.unpacked)
    head = Head(bytes(32), 0, 0, 0, bytes(32), bytes(32), PEERS)
    for frame in list(frames.values())[:5]:
        inbox.check(frame.data, head)
    assert outer_step(arriving, record, frames).digest == alone
    assert outer_step(given, record, frames).digest == alone


@pytest.mark.parametrize("spelling", ["rfa", "krum f=2", "nnm f=2", "caf f=2"])
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


@pytest.mark.parametrize("spelling", RULES)
def test_two_of_eight_that_send_ten_times_the_opposite_are_borne(spelling: str):
    assert spelling.split()[0] not in TRUSTS
    assert distance_after(spelling, "none") < 2.0


def test_the_mean_runs_away_from_two_of_eight():
    assert distance_after("mean", "none") > 1e3


@pytest.mark.parametrize("spelling", ["rfa", "krum f=2", "nnm f=2", "mda f=2"])
def test_sparse_frames_bear_it_as_well(spelling: str):
    """A sixteenth of the values is sent in a round; the anchor begins 30 spreads away."""
    assert distance_after(spelling, "topk(k=256, chunk=4096)", 60) < 10.0
