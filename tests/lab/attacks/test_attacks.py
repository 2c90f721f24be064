"""What is each attack's own, worked out by hand, and what is said where a spelling is none."""

from __future__ import annotations

import math

import pytest
import torch

from decentral.errors import ConfigError
from decentral.lab.attacks import index_overlap, line_search, make_attack
from tests.lab.attacks.rules import trusting

HONEST = torch.tensor([[1.0, 2.0, 0.0], [3.0, 2.0, 0.0]])


def sent(word: str, f: int = 2) -> torch.Tensor:
    return make_attack(word).changes(HONEST, f, trusting, torch.Generator().manual_seed(1))


def test_scale_is_the_honest_mean_so_many_times():
    assert sent("scale(factor=10)").tolist() == [[20.0, 20.0, 0.0]] * 2


def test_alie_takes_deviations_off_that_are_counted_with_one_peer_less():
    wanted_N = torch.tensor([2.0 - 1.5 * math.sqrt(2.0), 2.0, 0.0])
    torch.testing.assert_close(sent("alie"), wanted_N.expand(2, -1))


def test_noise_is_as_long_as_honest_changes_are():
    honest_KN = torch.ones(5, 10_000)
    found_FN = make_attack("noise(times=3)").changes(honest_KN, 2, trusting, torch.Generator().manual_seed(0))
    torch.testing.assert_close(found_FN.norm(dim=1), torch.full((2,), 300.0), rtol=0.05, atol=0.0)
    assert abs(torch.cosine_similarity(found_FN[0], found_FN[1], dim=0)) < 0.05


def test_labels_are_flipped_to_their_opposites():
    attack = make_attack("label_flip")
    assert attack.labels(torch.tensor([0, 3, 9]), 10).tolist() == [9, 6, 0]
    assert attack.labels(torch.tensor([0, 255]), 256).tolist() == [255, 0]


def test_a_copycat_has_all_places_of_its_victim_and_no_value():
    found_FN = sent("copycat", f=3)
    assert [index_overlap(row_N, HONEST[k % 2]) for k, row_N in enumerate(found_FN)] == [1.0] * 3
    assert not torch.equal(found_FN[0], HONEST[0])
    torch.testing.assert_close(found_FN[0], HONEST[0], rtol=0.5, atol=0.0)


def test_the_overlap_is_of_the_shorter_frame():
    assert index_overlap(torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([1.0, 0.0, 1.0, 1.0])) == 0.5
    assert index_overlap(torch.zeros(3), torch.ones(3)) == 0.0


def test_frames_are_withheld_as_often_as_the_share_says():
    generator = torch.Generator().manual_seed(0)
    delivered = [one for _ in range(400) for one in make_attack("withheld(share=0.25)").delivers(3, generator)]
    assert 0.7 < sum(delivered) / len(delivered) < 0.8
    assert make_attack("withheld(share=1)").delivers(3, generator) == [False] * 3


def test_the_search_doubles_its_steps_and_shrinks_them_once_it_overshoots():
    tried: list[float] = []

    def distance(factor: float) -> float:
        tried.append(factor)
        return -abs(factor - 35.0)

    assert line_search(distance, 10.0, 7, 0.5) == (35.0, 0.0)
    assert tried == [0.0, 10.0, 30.0, 70.0, 50.0, 40.0, 35.0]


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("sign_flop", "did you mean sign_flip"),
        ("scale(factor=-1)", "want a factor above 0"),
        ("scale(times=2)", "attack scale has no times"),
        ("noise(times=0)", "want times above 0"),
        ("alie(z=inf)", "finite number of standard deviations"),
        ("ipm(tau=0)", "want tau above 0"),
        ("mimic(victim=-1)", "place of an honest peer"),
        ("copycat(noise=2)", r"want it in \[0, 1\]"),
        ("withheld(share=0)", r"want it in \(0, 1\]"),
        ("optimised_alie(evaluations=1)", "want 2 to 1000"),
        ("scale(", "such as sign_flip"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(word: str, told: str):
    with pytest.raises(ConfigError, match=told):
        make_attack(word)
