"""What every attack keeps to, so that it can be put in the place of any other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from decentral.lab.attacks import Attack, Rule, attack_names, describe_attacks, distance_from_honest, make_attack
from tests.lab.attacks.rules import RULES, tried, trusting

ALL = (*attack_names(), "scale(factor=100)", "noise(times=100)", "alie(z=-1.5)", "ipm(tau=0.1)", "withheld(share=1)")
CRAFTED = tuple(word for word in ALL if make_attack(word).crafts)
FIXED = tuple(word for word in CRAFTED if word.split("(")[0] in ("alie", "ipm"))
K, F, N = 7, 3, 40


def honest(seed: int = 0, count: int = K) -> Tensor:
    """Changes that agree a little, most of them zero, as sparse frames decode."""
    generator = torch.Generator().manual_seed(seed)
    common_N = torch.randn(N, generator=generator)
    kept_KN = torch.rand((count, N), generator=generator) < 0.3
    return (common_N + torch.randn((count, N), generator=generator)) * kept_KN


def sent(attack: Attack, honest_KN: Tensor, rule: Rule = trusting, seed: int = 0, f: int = F) -> Tensor:
    return attack.changes(honest_KN, f, rule, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("word", CRAFTED)
@pytest.mark.parametrize("count", [1, 2, K])
@pytest.mark.parametrize("f", [1, F])
def test_each_hostile_peer_sends_a_finite_vector_of_the_fragment(word: str, count: int, f: int):
    honest_KN = honest(count=count)
    found_FN = sent(make_attack(word), honest_KN, f=f)
    assert found_FN.shape == (f, N)
    assert found_FN.dtype == honest_KN.dtype
    assert bool(found_FN.isfinite().all())


@pytest.mark.parametrize("word", CRAFTED)
def test_the_same_seed_sends_the_same_and_honest_changes_stay_as_they_are(word: str):
    attack, honest_KN = make_attack(word), honest()
    before_KN = honest_KN.clone()
    assert torch.equal(sent(attack, honest_KN), sent(attack, honest_KN))
    assert torch.equal(honest_KN, before_KN)


@pytest.mark.parametrize("word", ["noise", "copycat"])
def test_chance_comes_from_the_generator_alone(word: str):
    attack, honest_KN = make_attack(word), honest()
    assert not torch.equal(sent(attack, honest_KN, seed=0), sent(attack, honest_KN, seed=1))


@pytest.mark.parametrize("word", [word for word in CRAFTED if not word.startswith("optimised")])
def test_changes_of_another_unit_are_attacked_in_that_unit(word: str):
    """Learning rates differ by orders of magnitude: an attack that had a length of its own would be none for some."""
    attack, honest_KN = make_attack(word), honest()
    torch.testing.assert_close(sent(attack, honest_KN * 1e-4) * 1e4, sent(attack, honest_KN), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", RULES)
def test_no_fixed_attack_moves_a_rule_further_than_its_optimised_form(name: str):
    rule = tried(name, F)
    for seed in range(3):
        honest_KN = honest(seed)
        for word in FIXED:
            fixed, optimised = (make_attack(one) for one in (word, f"optimised_{word.split('(')[0]}"))
            if word == "ipm(tau=0.1)":
                continue  # no factor that the search is sure to try
            far = distance_from_honest(honest_KN, sent(optimised, honest_KN, rule), rule)
            assert far >= distance_from_honest(honest_KN, sent(fixed, honest_KN, rule), rule), (name, word, seed)


def test_vectors_that_no_peer_takes_are_never_tried():
    """Where a run has diverged, the honest mean times a factor is beyond float32, and no compressor takes it."""

    def refusing(row_PN: Tensor) -> Tensor:
        assert bool(row_PN.isfinite().all())
        return row_PN.double().mean(0)

    honest_KN = honest() * 1e36
    assert bool(sent(make_attack("optimised_ipm"), honest_KN, refusing).isfinite().all())


@pytest.mark.parametrize("word", ALL)
def test_only_attacks_on_data_change_labels_and_only_those_that_withhold_keep_frames_back(word: str):
    attack = make_attack(word)
    label_B = torch.arange(10)
    assert torch.equal(attack.labels(label_B, 10), label_B) != attack.poisons_data
    delivered = [all(attack.delivers(F, torch.Generator().manual_seed(seed))) for seed in range(20)]
    assert all(delivered) != attack.withholds


def test_every_attack_says_its_equation_and_its_source():
    for row in describe_attacks():
        assert row["equation"]
        assert str(row["source"])[-4:].isdigit() or "arXiv:" in str(row["source"])
