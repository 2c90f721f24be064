"""Each rule against its paper's dense equation, a published library, and in the places where others went wrong."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decentral.errors import ConfigError
from decentral.optimizers import make_aggregation
from decentral.optimizers.aggregation.base import Sent
from decentral.optimizers.aggregation.by_gram import MOST_SUBSETS, drawn_groups
from decentral.optimizers.aggregation.gram import largest_eigenvectors
from tests.kit import aggregating as dense
from tests.kit.aggregating import aggregated, gaussian
from tests.kit.tables import rule_of

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/aggregation.json").read_text(encoding="utf-8"))
LIKE_THE_LIBRARY = {"rfa": "iterations=3 start=zero", "centered_clip": "start=zero"}
NESTED = "rfa(iterations=3)"


def spelled(name: str, f: int, count: int) -> dict[str, Any]:
    """The keys with which a rule of ours does what the library's does."""
    keys: dict[str, Any] = {}
    for word in " ".join([LIKE_THE_LIBRARY.get(name.split()[0], ""), *name.split()[1:]]).split():
        key, _, text = word.partition("=")
        keys[key] = text if text.isalpha() else float(text) if key == "tau" else int(text)
    keys |= {"f": f} if "f" in make_aggregation(name.split()[0], {}).__slots__ else {}
    return keys | ({"m": count - f - 1} if name == "multi_krum" else {})  # its n - f' of f' = f + 1


@pytest.mark.parametrize("case", range(len(GOLDEN["cases"])))
def test_rules_give_what_byzfl_gives(case: int):
    """No distance is below its floor of the geometric median here. Its Krum sums n - f' - 1 squared distances, where
    the paper has n - f - 2: the same with f' = f + 1. ``tests/golden/made_by/aggregation.py`` makes the vectors again.
    """
    given = GOLDEN["cases"][case]
    sent_KN = np.array(given["vectors"])
    for name, wanted in given["results"].items():
        if name.endswith("then=rfa"):
            continue  # below
        found = aggregated(make_aggregation(name.split()[0], spelled(name, given["f"], len(sent_KN))), sent_KN)
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("case", range(len(GOLDEN["cases"])))
@pytest.mark.parametrize("before", ["nnm", "arc", "bucketing size=1"])
def test_rules_after_another_give_what_byzfl_gives(before: str, case: int, monkeypatch: pytest.MonkeyPatch):
    """Its geometric median starts at zero, which a spelling of ``then`` cannot say: words are no numbers."""
    given = GOLDEN["cases"][case]
    sent_KN, wanted = np.array(given["vectors"]), given["results"][f"{before} then=rfa"]
    keys = spelled(before, given["f"], len(sent_KN)) | {"then": NESTED}
    made = make_aggregation(before.split()[0], keys)
    monkeypatch.setattr("decentral.optimizers.aggregation.by_gram.start_of", lambda sent, start: np.zeros(len(sent)))
    np.testing.assert_allclose(aggregated(made, sent_KN), wanted, rtol=1e-6, atol=1e-6)


def close(spelling: str, sent_KN: Any, wanted_N: Any) -> None:
    np.testing.assert_allclose(aggregated(rule_of(spelling), sent_KN), wanted_N, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_weights_from_inner_products_are_the_papers_dense_equations(seed: int):
    sent_KN = gaussian(9, 30, seed)
    sent_KN[:2] *= 5
    zero_N, mean_N = np.zeros(30), sent_KN.mean(0)
    close("centered_clip tau=3 start=zero", sent_KN, dense.dense_centered_clip(sent_KN, 3.0, 8, zero_N))
    close("centered_clip start=zero", sent_KN, dense.dense_centered_clip(sent_KN, None, 8, zero_N))
    first_N = sent_KN[np.argmin(np.linalg.norm(sent_KN[:, None] - sent_KN[None], axis=-1).sum(1))]
    close("centered_clip tau=3", sent_KN, dense.dense_centered_clip(sent_KN, 3.0, 8, first_N))
    close("rfa", sent_KN, dense.dense_rfa(sent_KN, 100, 1e-6, mean_N))
    close("krum f=2", sent_KN, sent_KN[np.argmin(dense.dense_krum_scores(sent_KN, 2))])
    order_K = np.argsort(dense.dense_krum_scores(sent_KN, 2))
    close("multi_krum f=2", sent_KN, sent_KN[order_K[:5]].mean(0))
    close("multi_krum f=2 m=3", sent_KN, sent_KN[order_K[:3]].mean(0))
    close("mda f=2", sent_KN, dense.dense_mda(sent_KN, 2))
    nnm_KN, arc_KN = dense.dense_nnm(sent_KN, 2), dense.dense_arc(sent_KN, 2)
    close("nnm f=2", sent_KN, dense.dense_rfa(nnm_KN, 100, 1e-6, nnm_KN.mean(0)))
    close("nnm f=2 then=krum", sent_KN, nnm_KN[np.argmin(dense.dense_krum_scores(nnm_KN, 2))])
    close("arc f=2", sent_KN, dense.dense_rfa(arc_KN, 100, 1e-6, arc_KN.mean(0)))
    close("arc f=2 then=nnm", sent_KN, dense.dense_rfa(dense.dense_nnm(arc_KN, 2), 100, 1e-6, mean_of(arc_KN)))
    np.testing.assert_allclose(aggregated(rule_of("caf f=2"), sent_KN), dense.dense_caf(sent_KN, 2), atol=1e-6)
    for rank in (1, 3, 5):
        found_N, wanted_N = aggregated(rule_of(f"flag rank={rank}"), sent_KN), dense.dense_flag(sent_KN, rank, 5)
        np.testing.assert_allclose(found_N, wanted_N, rtol=1e-9, atol=1e-9)


def mean_of(sent_KN: Any) -> Any:
    return dense.dense_nnm(sent_KN, 2).mean(0)


def test_the_geometric_median_comes_back_from_a_million_where_four_of_nine_lie():
    honest_KN = gaussian(5, 40, 1)
    found_N = aggregated(rule_of("rfa"), np.concatenate([np.full((4, 40), 1e6), honest_KN]))
    far = np.linalg.norm(honest_KN - honest_KN.mean(0), axis=1).max()
    assert np.linalg.norm(found_N - honest_KN.mean(0)) < 2 * far
    assert (
        np.linalg.norm(aggregated(rule_of("rfa iterations=32"), np.concatenate([np.full((4, 40), 1e6), honest_KN])))
        > 100 * far
    )


def test_the_narrowest_of_many_subsets_is_found_without_looking_at_all_their_pairs():
    """19,900 subsets of 198 have 19,503 pairs each."""
    sent_KN = gaussian(200, 3)
    assert math.comb(200, 2) <= MOST_SUBSETS
    sent_KN[7] += 100.0
    sent_KN[150] -= 100.0
    close("mda f=2", sent_KN, np.delete(sent_KN, [7, 150], axis=0).mean(0))


def test_centered_clip_with_a_large_radius_is_the_mean_at_once_and_with_a_small_one_stays_where_it_began():
    sent_KN = gaussian(7, 12)
    for start in ("zero", "medoid"):
        close(f"centered_clip tau=1e30 iterations=1 start={start}", sent_KN, sent_KN.mean(0))
    small = aggregated(rule_of("centered_clip tau=1e-30 start=zero"), sent_KN)
    assert np.abs(small).max() < 1e-28
    at = aggregated(rule_of("centered_clip tau=1e-30 start=medoid"), sent_KN)
    assert min(np.abs(at - one_N).max() for one_N in sent_KN) < 1e-12


@pytest.mark.parametrize("count", [7, 8, 9, 12])
def test_krum_returns_a_member(count: int):
    sent_KN = gaussian(count, 20, count)
    found_N = aggregated(rule_of("krum f=2"), sent_KN)
    assert min(np.abs(found_N - one_N).max() for one_N in sent_KN) < 1e-12


def test_of_contributions_with_equal_scores_krum_takes_the_first_whatever_rounding_says():
    """The nearest pair is mutually nearest: with one neighbour in the score both would win."""
    sent_KN = np.array([[9.0, 0.1], [0.3, 1.7], [0.3, 1.8], [-7.0, 5.0], [4.0, -8.0]])
    twins_KN = np.repeat(gaussian(3, 5), 3, axis=0)
    for given_KN in (sent_KN, twins_KN):
        sent = Sent.of_gram(given_KN @ given_KN.T, [1.0] * len(given_KN))
        square_KK = sent.squared_distances_KK()
        assert np.array_equal(square_KK, square_KK.T)
    scales = rule_of("krum f=1").weigh(Sent.of_gram(twins_KN @ twins_KN.T, [1.0] * 9))
    assert [place for place, scale in enumerate(scales) if scale] in ([0], [3], [6])


def test_the_first_subset_wins_where_two_are_as_wide():
    line_KN = np.array([[0.0], [1.0], [2.0], [3.0], [4.0]])
    close("mda f=1", line_KN, [1.5])


def test_where_subsets_are_too_many_multi_krum_decides():
    sent_KN = gaussian(24, 8)
    assert MOST_SUBSETS < 24 * 23 * 22 * 21 * 20 / 120
    close("mda f=5", sent_KN, aggregated(rule_of("multi_krum f=5"), sent_KN))


def test_arc_shortens_to_the_longest_of_those_it_leaves():
    """k = floor(2 * 7 / 49 * 42) = 12 of 49: the thirteenth longest is the limit."""
    found_N = aggregated(rule_of("arc f=7 then=mean"), np.diag(np.arange(1.0, 50.0)))
    np.testing.assert_allclose(found_N * 49, np.minimum(np.arange(1.0, 50.0), 37.0), rtol=1e-12)


def test_flag_with_all_directions_is_the_mean_of_directions_at_the_typical_length():
    sent_KN = gaussian(7, 12) * np.arange(1.0, 8.0)[:, None]
    norm_K = np.linalg.norm(sent_KN, axis=1)
    wanted_N = np.median(norm_K) * (sent_KN / norm_K[:, None]).mean(0)
    np.testing.assert_allclose(aggregated(rule_of("flag rank=7"), sent_KN), wanted_N, rtol=1e-9, atol=1e-9)


def test_contributions_without_a_direction_count_nothing_and_divide_by_nothing():
    sent_KN = np.concatenate([gaussian(5, 12), np.zeros((2, 12))])
    assert np.isfinite(aggregated(rule_of("flag"), sent_KN)).all()
    assert np.abs(aggregated(rule_of("flag"), np.zeros((5, 12)))).max() == 0.0


def test_where_contributors_are_too_many_for_flag_the_geometric_median_decides():
    sent_KN = gaussian(130, 4)
    close("flag", sent_KN, aggregated(rule_of("rfa"), sent_KN))


def test_eigenvectors_are_those_of_a_library_up_to_their_sign():
    for size in (1, 2, 5, 12):
        rows = gaussian(size, 3 * size, size)
        _, vectors = np.linalg.eigh(rows @ rows.T)
        found = largest_eigenvectors(rows @ rows.T, size)
        assert len(found) == size
        np.testing.assert_allclose(np.abs((found * vectors.T[::-1]).sum(1)), 1.0, rtol=1e-9)
    assert len(largest_eigenvectors(np.ones((4, 4)), 3)) == 1, "the others are rounding"


def test_caf_ends_where_attackers_are_at_very_different_lengths():
    """A filter that measures against one who is gone takes a millionth from the nearer attacker in a lap."""
    sent_KN = gaussian(9, 10)
    honest_N = sent_KN[2:].mean(0)
    sent_KN[0], sent_KN[1] = 1e6, 1e3
    found_N = aggregated(rule_of("caf f=2"), sent_KN)
    assert np.linalg.norm(found_N - honest_N) < np.linalg.norm(sent_KN[2:] - honest_N, axis=1).max()


def test_groups_are_drawn_anew_in_each_round_and_alike_by_all():
    assert drawn_groups(7, 2, b"a") == drawn_groups(7, 2, b"a") != drawn_groups(7, 2, b"b")
    groups = drawn_groups(7, 2, b"a")
    assert sorted(len(group) for group in groups) == [1, 2, 2, 2]
    assert sorted(place for group in groups for place in group) == list(range(7))


def test_groups_weigh_what_their_members_do_so_that_their_mean_is_the_mean():
    sent_KN, weights = gaussian(7, 9), [1.0, 2.0, 0.5, 1.0, 4.0, 1.0, 0.25]
    found_N = aggregated(rule_of("bucketing size=3 then=mean"), sent_KN, weights)
    np.testing.assert_allclose(found_N, np.average(sent_KN, axis=0, weights=weights), rtol=1e-12)


def test_where_the_suspects_could_spoil_half_of_the_groups_there_are_no_groups():
    sent_KN = gaussian(8, 9)
    close("bucketing f=2 size=2 then=krum", sent_KN, aggregated(rule_of("krum f=2"), sent_KN))
    close("bucketing f=1 size=2 then=mda", sent_KN, grouped_mda(sent_KN))


def grouped_mda(sent_KN: Any) -> Any:
    return dense.dense_mda(np.stack([sent_KN[group].mean(0) for group in drawn_groups(8, 2, b"round")]), 1)


def test_the_median_of_an_even_number_is_between_the_middle_two_and_does_not_overflow():
    found = rule_of("median").combine(torch.tensor([[1.0, 3e38], [4.0, 3e38], [2.0, 3.2e38], [100.0, -1.0]]))
    assert found.tolist() == [3.0, pytest.approx(3e38)]


def test_a_rule_by_inner_products_leaves_sparse_contributions_their_values_and_a_median_does_not():
    sent_KN, chosen = np.zeros((9, 1000)), np.random.default_rng(0)
    for row_N in sent_KN:
        row_N[chosen.choice(1000, 16, replace=False)] = chosen.normal(size=16)
    assert np.abs(aggregated(rule_of("median"), sent_KN)).max() == 0.0
    assert np.count_nonzero(aggregated(rule_of("rfa"), sent_KN)) > 100


def test_two_contributors_are_averaged_and_too_few_for_a_rule_are_shortened():
    sent_KN = gaussian(4, 6)
    sent_KN[0] *= 1e6
    clipped_N = aggregated(rule_of("norm_clip"), sent_KN)
    for spelling in ("krum f=1", "multi_krum f=3", "mda f=2", "nnm f=2", "trimmed_mean f=2"):
        close(spelling, sent_KN, clipped_N)
    for spelling in ("krum f=1", "rfa", "centered_clip", "caf f=1", "arc f=1", "bucketing"):
        close(spelling, sent_KN[:2], sent_KN[:2].mean(0))


def test_contributors_that_count_nothing_are_not_looked_at():
    sent_KN = np.concatenate([gaussian(6, 8), np.full((2, 8), 50.0)])
    for spelling in ("krum f=1", "mda f=1", "rfa", "nnm", "median", "caf"):
        found_N = aggregated(rule_of(spelling), sent_KN, [1.0] * 6 + [0.0] * 2)
        np.testing.assert_allclose(found_N, aggregated(rule_of(spelling), sent_KN[:6]), rtol=1e-12)


def test_where_all_are_equal_nothing_is_divided_by_their_distance():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for spelling in ("rfa", "centered_clip", "krum", "caf", "nnm", "arc", "bucketing size=1"):
            close(spelling, np.zeros((6, 3)), np.zeros(3))
            np.testing.assert_allclose(aggregated(rule_of(spelling), np.ones((6, 3))), np.ones(3), rtol=1e-7)


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("krumm", {}, r"aggregation rule krumm is not known here; .*did you mean krum\?"),
        ("krum", {"f": 0}, "0 is the rule mean"),
        ("krum", {"f": 512}, "1 <= f < 512"),
        ("krum", {"f": 1.5}, "must be a whole number"),
        ("krum", {"g": 1}, r"has no g; did you mean|known: f"),
        ("multi_krum", {"m": 0}, "1 or more"),
        ("multi_krum", {"m": 2.5}, "whole number"),
        ("centered_clip", {"tau": 0.0}, "above 0"),
        ("centered_clip", {"iterations": 0}, "1 <= iterations"),
        ("centered_clip", {"start": "here"}, "want one of zero, medoid"),
        ("rfa", {"start": "medoid"}, "want one of zero, mean"),
        ("rfa", {"floor": 0.0}, "share of a norm"),
        ("bucketing", {"size": 0}, "1 <= size"),
        ("nnm", {"then": "median"}, "goes by coordinates"),
        ("nnm", {"then": "krumm"}, r"did you mean krum\?"),
        ("nnm", {"then": "rfa(iterations=0)"}, "1 <= iterations"),
        ("flag", {"rank": 0}, "a whole one from 1 on"),
        ("arc", {"then": "("}, "want name or name"),
    ],
)
def test_what_cannot_be_meant_says_what_could(name: str, keys: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        make_aggregation(name, keys)
    assert "\n" not in str(caught.value)
