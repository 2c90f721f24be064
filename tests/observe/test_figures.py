"""The figures of a round against dense references, and what has none."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decentral.observe.contributions import (
    LAST_PAIRS,
    Coverage,
    Distances,
    compare,
    compare_losses,
    compare_two,
    dispersion,
    mean_cosine,
    ratio,
)
from decentral.observe.diagnostics import (
    LOSS_DISPERSION,
    MEAN_COSINE,
    NORM_DISPERSION,
    REPLICA_DISTANCE,
    REPLICA_VARIANCE,
)
from decentral.optimizers import CHANGE, Channel, Contributor, Speaking
from decentral.optimizers.diloco import DiLoCo
from decentral.replica.measures import MOST_PLACES, Measure, Sample

LONG = 4 * MOST_PLACES + 5


def random(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def measures(updates: list[Tensor]) -> list[Measure]:
    return [Measure.of([update], update.numel()) for update in updates]


def dense_cosine(updates: list[Tensor]) -> float:
    """Over all pairs, one by one."""
    pairs = itertools.combinations([update.double() for update in updates], 2)
    return float(np.mean([float(a @ b / (a.norm() * b.norm())) for a, b in pairs]))


# ---- between peers ----


@pytest.mark.parametrize("shared", [0.0, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("count", [2, 3, 8, 40])
def test_the_mean_cosine_is_that_of_all_pairs_give_or_take_what_sketches_blur(count: int, shared: float) -> None:
    common, seeds = random(20_000, 0), range(1, count + 1)
    updates = [shared * common + 0.5 * seed * random(20_000, seed) for seed in seeds]
    found = compare(measures(updates), [30] * len(updates))
    assert found[MEAN_COSINE] == pytest.approx(dense_cosine(updates), abs=0.12 / (count - 1) ** 0.5)


def test_updates_that_are_equal_have_cosine_one_and_opposite_ones_minus_one_whatever_their_length() -> None:
    update = random(5000, 1)
    assert compare(measures([update, 3 * update, 0.1 * update]), [30] * 3)[MEAN_COSINE] == pytest.approx(1.0, abs=1e-6)
    assert compare(measures([update, -2 * update]), [30] * 2)[MEAN_COSINE] == pytest.approx(-1.0, abs=1e-6)


def test_who_has_just_come_is_no_reason_why_updates_differ_in_length() -> None:
    """Of twelve that joined, each was said to have another learning rate."""
    one, two = random(5000, 1), random(5000, 2)
    found = compare(measures([one, two, 0.05 * one]), [30, 28, 3])
    assert NORM_DISPERSION in compare(measures([one, two, 5 * one]), [30, 28, 10**9]), "a claim blinds nobody"
    assert found[NORM_DISPERSION] < 0.1 < compare(measures([one, two, 0.05 * one]), [30, 28, 30])[NORM_DISPERSION]


@pytest.mark.parametrize("norms", [(1.0, 1.0, 1.0), (1.0, 2.0, 4.0, 7.9), (0.0, 1.0), (1e-30, 3e30, 2e30)])
def test_the_dispersion_is_the_standard_deviation_over_the_mean(norms: tuple[float, ...]) -> None:
    assert dispersion(norms) == pytest.approx(np.std(norms) / np.mean(norms), rel=1e-12)


@pytest.mark.parametrize("values", [(), (1.0,), (0.0, 0.0), (1.0, math.inf), (1.0, math.nan), (-1.0, 1.0)])
def test_what_has_no_mean_above_zero_has_no_dispersion(values: tuple[float, ...]) -> None:
    assert dispersion(values) is None


def test_updates_without_a_direction_are_left_out_of_the_cosine() -> None:
    one, other = random(1024, 1), random(1024, 2)
    whole = mean_cosine([one, other])
    assert mean_cosine([one, torch.zeros(1024), other, torch.full((1024,), math.inf)]) == whole
    assert mean_cosine([one, torch.zeros(1024)]) is None
    assert mean_cosine([]) is None


def test_values_near_the_end_of_float32_have_finite_figures() -> None:
    """A frame may hold them: it is NaN and Inf that are refused. Their sketch is Inf, and tells no direction."""
    found = compare(measures([torch.full((5000,), 3e38), random(5000, 1), random(5000, 2)]), [30] * 3)
    assert found[NORM_DISPERSION] == pytest.approx(2**0.5)
    assert found[MEAN_COSINE] == compare(measures([random(5000, 1), random(5000, 2)]), [30] * 2)[MEAN_COSINE]


def test_one_peer_alone_differs_from_nobody() -> None:
    assert compare(measures([random(100, 1)]), [30]) == {}
    assert compare([], []) == {}


# ---- a sample for all ----


@pytest.mark.parametrize("numel", [1, MOST_PLACES, MOST_PLACES + 1, LONG])
def test_a_sample_has_distinct_rising_places_from_the_whole_fragment(numel: int) -> None:
    places = Sample(numel).of(torch.arange(numel))
    assert len(places) == min(numel, MOST_PLACES)
    assert bool((places.diff() > 0).all())
    assert int(places[0]) < max(1, 2 * numel // MOST_PLACES)
    assert int(places[-1]) >= numel - max(1, 2 * numel // MOST_PLACES) - 1


@pytest.mark.parametrize("numel", [100, LONG])
def test_the_ratio_of_two_norms_is_that_of_the_whole(numel: int) -> None:
    one, other = 3 * random(numel, 1), random(numel, 2)
    found = ratio(Sample(numel).of(one), Sample(numel).of(other))
    assert found == pytest.approx(float(one.norm() / other.norm()), rel=1e-6 if numel <= MOST_PLACES else 0.05)


def test_a_ratio_to_nothing_is_none_and_one_of_huge_values_a_number() -> None:
    huge = torch.full((10,), 3e38)
    assert ratio(huge, torch.zeros(10)) is None
    assert ratio(huge, huge) == 1.0


@pytest.mark.parametrize("numel", [1000, LONG])
def test_what_was_never_sent_is_what_no_round_had(numel: int) -> None:
    sample = Sample(numel)
    coverage, sent, random_ = Coverage([sample]), torch.zeros(numel, dtype=torch.bool), np.random.default_rng(0)
    assert coverage.never_sent is None
    for rounds in range(1, 6):
        change = torch.from_numpy((random_.random(numel) < 0.1).astype(np.float32))
        sent |= change != 0
        coverage.add(0, sample.nonzero(change))
        truth = 1 - float(sent.float().mean())
        assert coverage.never_sent == pytest.approx(truth, abs=1e-6 if numel <= MOST_PLACES else 0.02)
        assert coverage.rounds == rounds


@pytest.mark.parametrize("apart", [False, True])
def test_what_several_peers_send_in_a_round_counts_together_and_fragments_by_their_size(apart: bool) -> None:
    samples = [Sample(100), Sample(300)]
    coverage = Coverage(samples)
    rows = torch.zeros(2, 100)
    rows[0, :30], rows[1, 20:50] = 1.0, -1.0
    coverage.add(0, *map(samples[0].nonzero, rows if apart else [rows]))
    assert coverage.never_sent == pytest.approx((50 + 300) / 400)
    assert coverage.rounds == 0, "of the other fragment none was looked at"


# ---- pairs ----

SLOW = Channel("slow", is_replica=True)


def test_a_pair_has_the_figures_of_its_two_changes_alike_on_both_sides() -> None:
    mine, theirs = random(500, 1), 2 * random(500, 2) + random(500, 1)
    halves = [torch.stack([change, random(500, seed)]) for seed, change in ((8, mine), (9, theirs))]
    found = compare_two([CHANGE, SLOW], *halves, Sample(500))
    assert found[MEAN_COSINE] == pytest.approx(dense_cosine([mine, theirs]), abs=1e-6)
    norms = [float(mine.norm()), float(theirs.norm())]
    assert found[NORM_DISPERSION] == pytest.approx(np.std(norms) / np.mean(norms), rel=1e-6)
    assert compare_two([CHANGE, SLOW], *reversed(halves), Sample(500)) == found


def test_who_keeps_the_change_at_home_tells_no_more_than_the_distance() -> None:
    assert compare_two([SLOW], random(500, 1)[None], random(500, 2)[None], Sample(500)) == {}


def test_half_the_mean_square_of_distances_is_the_variance_of_the_replicas() -> None:
    centre = random(5000, 0)
    replicas = [centre + 0.05 * random(5000, seed) for seed in range(1, 2 + LAST_PAIRS)]
    mean = sum(replicas) / len(replicas)  # type: ignore[arg-type]
    variance = np.mean([float((one - mean).square().sum()) for one in replicas]) / float(mean.square().sum())
    distances, found = Distances(), dict[str, float]()
    for one in replicas[1:]:
        found = distances.add(float((one - replicas[0]).norm() / replicas[0].norm()))
    assert found[REPLICA_VARIANCE] == pytest.approx(variance, rel=0.15)
    assert found[REPLICA_DISTANCE] == pytest.approx(0.05 * 2**0.5, rel=0.05)


def test_a_step_taken_alone_tells_no_distance_and_old_pairs_are_forgotten() -> None:
    distances = Distances()
    assert distances.add(None) == {}
    distances.add(1.0)
    for _ in range(LAST_PAIRS):
        found = distances.add(0.0)
    assert found == {REPLICA_DISTANCE: 0.0, REPLICA_VARIANCE: 0.0}


# ---- losses ----


def telling(told_loss: Callable[..., Any]) -> DiLoCo:
    made: type[DiLoCo] = dataclasses.make_dataclass(
        "Telling", [], bases=(Speaking, DiLoCo), frozen=True, namespace={"told_loss": told_loss}
    )
    return made()


TOLD = [Contributor(bytes([n]) * 32, 1, 1, 0, bytes([n])) for n in (1, 2, 3)]


def test_losses_that_summaries_tell_have_a_dispersion() -> None:
    found = compare_losses(telling(lambda self, told: float(told.summary[0])), TOLD)
    assert found == {LOSS_DISPERSION: pytest.approx(np.std([1, 2, 3]) / 2)}


def refuses(self: object, told: Contributor) -> float:
    raise RuntimeError("no loss in it")


@pytest.mark.parametrize(
    "told_loss",
    [refuses, lambda self, told: None, lambda self, told: "high", lambda self, told: math.nan, lambda self, told: []],
)
def test_a_method_whose_summaries_tell_no_number_has_none(told_loss: Callable[..., Any]) -> None:
    assert compare_losses(telling(told_loss), TOLD) == {}


def test_methods_of_ours_tell_no_loss() -> None:
    assert compare_losses(DiLoCo(), TOLD) == {}
