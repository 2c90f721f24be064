"""MuLoCo: DiLoCo's outer step at a rate and a momentum that follow the number of peers, around Muon."""

from __future__ import annotations

import pytest
import torch

from decentral.errors import ConfigError
from decentral.manifest import preset_manifest
from decentral.optimizers.diloco import DiLoCo
from decentral.optimizers.muloco import MuLoCo, outer_settings
from tests.kit.stepping import step


def randn(seed: int) -> torch.Tensor:
    return torch.randn(101, generator=torch.Generator().manual_seed(seed))


SETTINGS = {1: (0.7, 0.6), 2: (0.7, 0.6), 3: (0.9, 0.8), 8: (0.9, 0.8), 11: (0.9, 0.8), 12: (1.0, 0.9), 99: (1.0, 0.9)}


@pytest.mark.parametrize(("peers", "settings"), SETTINGS.items())
def test_rate_and_momentum_are_those_of_the_nearest_of_1_8_and_16_peers(peers, settings):
    assert outer_settings(peers) == settings
    anchor, change = randn(0), randn(1)
    ours, diloco = MuLoCo(), DiLoCo(*settings)
    a, b = (anchor, ours.init(anchor)), (anchor, diloco.init(anchor))
    for _ in range(3):
        a, b = step(ours, a[0], change, a[1], peers), step(diloco, b[0], change, b[1], peers)
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1]["momentum"], b[1]["momentum"])


def test_on_a_quadratic_it_is_nesterovs_recursion_in_closed_form():
    """Inner steps that lead to the minimum of x*x/2: g = x, so (x, m) is multiplied by one matrix in every round."""
    lr, mu = outer_settings(8)
    matrix = torch.tensor([[1 - lr * (1 + mu), -lr * mu * mu], [1.0, mu]], dtype=torch.float64)
    wanted = torch.linalg.matrix_power(matrix, 20) @ torch.tensor([1.0, 0.0], dtype=torch.float64)
    method, x = MuLoCo(), torch.ones(1, dtype=torch.float64)
    state = method.init(x)
    for _ in range(20):
        x, state = step(method, x, x, state, peers=8)
    torch.testing.assert_close(torch.cat([x, state["momentum"]]), wanted, rtol=1e-12, atol=1e-12)


def test_a_key_that_is_set_holds_for_any_number_of_peers_and_leaves_the_other_to_it():
    anchor, change = randn(0), randn(1)
    for given, alike in ((MuLoCo(lr=0.5), DiLoCo(0.5, 0.8)), (MuLoCo(momentum=0.5), DiLoCo(0.9, 0.5))):
        ours, theirs = (
            step(given, anchor, change, given.init(anchor), 8),
            step(alike, anchor, change, alike.init(anchor), 8),
        )
        assert torch.equal(ours[0], theirs[0])


def test_a_round_of_fewer_peers_takes_their_settings_and_keeps_the_momentum():
    method, anchor = MuLoCo(), randn(0)
    _, state = step(method, anchor, randn(1), method.init(anchor), peers=8)
    after, kept = step(method, anchor, randn(2), state, peers=1)
    buffer = state["momentum"] * 0.6 + randn(2)
    assert torch.equal(kept["momentum"], buffer)
    torch.testing.assert_close(after, anchor - 0.7 * (randn(2) + 0.6 * buffer))


def test_the_preset_has_muon_inside_and_error_feedback_that_forgets():
    manifest = preset_manifest("muloco")
    inner = manifest.inner
    assert (inner.optimizer_name, inner.steps, inner.momentum, inner.beta1, inner.beta2) == ("muon", 30, 0.9, 0.9, 0.99)
    assert inner.clip == 1.0
    assert manifest.compressor.feedback == "ef(beta=0.9)"
    assert manifest.outer.hyper == {}
    assert "# momentum = 0.8" in manifest.to_toml(), "unset, and shown with an example that TOML can read"
    changed = preset_manifest("muloco", inner={"optimizer": "adamw", "momentum": None, "steps": 10})
    assert (changed.inner.optimizer_name, changed.inner.steps) == ("adamw", 10)


@pytest.mark.parametrize("hyper", [{"lr": 0.0}, {"momentum": 1.0}, {"momentum": -0.1}])
def test_numbers_that_cannot_be_are_refused(hyper: dict[str, float]):
    with pytest.raises(ConfigError, match=r"^muloco\("):
        MuLoCo(**hyper)
    with pytest.raises(ConfigError, match="at least 1 peer"):
        outer_settings(0)
