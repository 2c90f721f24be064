"""What of a model is not trained, buffers and frozen parameters, among real peers: shared, kept, exported."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn

import decentral
from decentral.parameters import schema_of
from tests.kit.problems import joined, train
from tests.kit.tables import long_but, rows_but
from tests.kit.trainees import Trainee, answers, assert_alike, exported, pair, terms


class Normed(nn.Module):
    """Two blocks with batch norm and a head, so that it has three fragments."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(2))
        self.head = nn.Linear(6, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return self.head(inputs)


class Adapted(nn.Module):
    """A frozen base with a low-rank update on top of it."""

    def __init__(self, base: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(base)
        self.layers = nn.ModuleList([nn.Linear(6, 6)])
        for parameter in self.layers.parameters():
            parameter.requires_grad_(False).copy_(torch.randn(parameter.shape, generator=generator))
        self.down, self.up = nn.Parameter(torch.ones(2, 6)), nn.Parameter(torch.zeros(6, 2))
        self.register_buffer("scale", torch.tensor(0.1, dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers[0](inputs) + self.scale.float() * inputs @ self.down.T @ self.up.T


class Experts(nn.Module):
    """Low-rank updates of very many experts, of which each has few values."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ParameterList(nn.Parameter(torch.zeros(2, 3)) for _ in range(200))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ torch.cat(list(self.experts)).view(6, -1).mean(dim=1)


@pytest.mark.long
@pytest.mark.parametrize("preset", long_but(["diloco"], ["diloco", "sparseloco"]))
def test_very_many_small_parameters_are_trained_together(preset: str, tmp_path: Path) -> None:
    swarm = pair(terms(preset), Experts, tmp_path)
    before = swarm.problems[0].says()
    says = answers(swarm)
    assert torch.equal(says[0], says[1]), "both have the last anchor"
    assert not torch.equal(says[0], before)


# Gather, reduce, pair; where a pair has two fragments, the last swap carries no buffers.
KINDS = [(preset, 1, make) for preset in ("sparseloco", "diloco", "noloco") for make in (Normed, Adapted)]
FEW = (("sparseloco", 1, Adapted), ("diloco", 1, Normed), ("noloco", 2, Normed))


@pytest.mark.parametrize(("preset", "fragments", "make"), rows_but(FEW, [*KINDS, ("noloco", 2, Normed)]))
def test_peers_their_restarts_and_their_exports_say_the_same(tmp_path, preset, fragments, make):
    swarm = pair(terms(preset, outer={"fragments": fragments}), make, tmp_path)
    said, again = answers(swarm), Trainee(make(), 1)
    with joined(swarm.manifest, again, tmp_path / "peer1"):
        assert_alike(*said, again.says(), *(exported(make, tmp_path / f"peer{number}") for number in range(2)))
    assert not torch.allclose(said[0], Trainee(make(), 0).says())  # something was learnt


@pytest.mark.parametrize("make", [Normed, Adapted])
def test_a_newcomer_begins_with_the_whole_model_of_the_run(tmp_path, make):
    founder, newcomer = Trainee(make(), 0), Trainee(make(), 1)
    with joined(terms("sparseloco", run={"rounds": 1000}), founder, tmp_path / "0") as first:
        train(first, founder, 3)
        with joined(first.invite, newcomer, tmp_path / "1"):
            assert_alike(founder.says(), newcomer.says())


def test_a_restart_goes_on_with_the_buffers_that_the_journal_led_to(tmp_path):
    """The last checkpoint is older than the last commit."""
    manifest, founder = terms("sparseloco", run={"rounds": 1000}), Trainee(Normed(), 0)
    with suppress(ZeroDivisionError), joined(manifest, founder, tmp_path, checkpoint_every=1000) as peer:
        train(peer, founder, 3)
        answer = founder.says()
        raise ZeroDivisionError  # an error in the script: no checkpoint is written, as when it is killed
    again = Trainee(Normed(), 0)
    with joined(manifest, again, tmp_path):
        assert_alike(answer, again.says())


def test_with_buffers_of_their_own_peers_keep_them_and_begin_with_the_founders(tmp_path):
    swarm = pair(terms("sparseloco", model={"buffers": "own"}), Normed, tmp_path).ends_alike()
    first, second = (trainee.model.layers[0][1].running_mean for trainee in swarm.problems)
    assert not torch.allclose(first, second)
    again = Trainee(Normed(), 1)
    with joined(swarm.manifest, again, tmp_path / "peer1"):
        assert torch.equal(again.model.layers[0][1].running_mean, second)
    assert_alike(swarm.problems[1].says(), exported(Normed, tmp_path / "peer1"))


def test_the_first_contributors_buffers_are_everybodys_where_the_manifest_says_so(tmp_path):
    assert_alike(*answers(pair(terms("sparseloco", model={"buffers": "first"}), Normed, tmp_path)))


def test_adapters_on_another_base_are_refused_with_the_tensor_that_differs(tmp_path):
    founder, other = Trainee(Adapted(base=0), 0), Trainee(Adapted(base=1), 1)
    with joined(terms("sparseloco"), founder, tmp_path / "0") as peer:
        refused = joined(peer.invite, other, tmp_path / "1")
        words = r"layers\.0\.weight: frozen, other values here than in the run: the base model differs"
        with pytest.raises(decentral.ManifestMismatch, match=words) as error, refused:
            pass
        assert error.value.exit_code == 11
    assert not (tmp_path / "1" / "frozen.safetensors").exists()


def test_a_restart_on_another_base_is_refused_with_the_tensor_that_differs(tmp_path):
    manifest = terms("sparseloco")
    with joined(manifest, Trainee(Adapted(base=0), 0), tmp_path):
        pass
    with pytest.raises(decentral.ManifestMismatch, match=r"layers\.0\.weight: frozen, other values"):
        joined(manifest, Trainee(Adapted(base=1), 0), tmp_path).__enter__()


def test_a_buffer_that_is_not_finite_is_refused_before_anything_is_trained(tmp_path):
    trainee = Trainee(Adapted(), 0)
    trainee.model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    with pytest.raises(decentral.ConfigError, match="NaN or Inf in the buffer mask"):
        joined(terms("sparseloco"), trainee, tmp_path).__enter__()


def test_a_compiled_and_a_plain_model_are_one_run(tmp_path):
    compiled = torch.compile(Normed(), backend="eager")
    assert schema_of(compiled) == schema_of(Normed())
    founder, newcomer = Trainee(compiled, 0), Trainee(Normed(), 1)
    manifest = terms("sparseloco", run={"rounds": 1000})
    with joined(manifest, founder, tmp_path / "0", checkpoint_every=1) as first:
        train(first, founder, 1)
        with joined(first.invite, newcomer, tmp_path / "1"):
            assert_alike(founder.says(), newcomer.says())
    assert_alike(founder.says(), exported(Normed, tmp_path / "0"))
