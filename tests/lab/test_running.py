"""Cells: the same one gives the same bits, references are plain training, and controls come out worse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from decentral.lab.cells import Cell, Looks
from decentral.lab.running import Outcome, run_cell
from decentral.lab.terms import Link
from decentral.lab.work import Digits
from decentral.manifest import preset_manifest
from tests.devices import DEVICES
from tests.kit.tables import long_but
from tests.lab.declared import of

PEERS, ROUNDS, STEPS = 3, 4, 6


def cell(preset: str = "diloco", kind: str = "swarm", peers: int = PEERS, **more: object) -> Cell:
    each = STEPS if kind == "swarm" else 1
    manifest = preset_manifest(
        preset,
        run={"name": "lab", "salt": "lab", "seed": 7, "rounds": ROUNDS * STEPS // each},
        model={"task": "custom", "hidden": 16, "layers": 1, "context": 1},
        inner={"steps": each, "warmup": 3, "learning_rate": 0.01, "clip": 1.0},
    )
    given = {"steps": ROUNDS * STEPS, "points": 2, "windows": 0, "text": "", "alpha": 1.0} | more
    return Cell.of(kind, "digits", peers, manifest, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("preset", long_but(["noloco"], ["diloco", "sparseloco", "noloco"]))
def test_the_same_cell_gives_the_same_bits(preset: str) -> None:
    first, second = (run_cell(cell(preset)) for _ in range(2))
    assert first.status == "done"
    assert of(first) == of(second)


@pytest.mark.parametrize("flips", ["update", "momentum"])
def test_a_control_comes_out_worse(flips: str) -> None:
    usual, wrong = run_cell(cell()).loss, run_cell(cell(flips=flips)).loss
    assert usual is not None
    assert wrong is None or wrong > 1.02 * usual


def test_data_parallel_training_of_one_peer_is_plain_training() -> None:
    one = cell(kind="data-parallel", preset="local_sgd", peers=1)
    inner, work = one.manifest.inner, Digits(one.manifest, 1, 1.0)
    model = work.model()
    decay, betas = inner.weight_decay, (0.9, 0.95)
    optimizer = torch.optim.AdamW(model.parameters(), inner.learning_rate, betas, weight_decay=decay, fused=True)
    for step in range(ROUNDS * STEPS):
        optimizer.param_groups[0]["lr"] = inner.learning_rate * min(1.0, (step + 1) / inner.warmup)
        optimizer.zero_grad()
        work.loss(model, 0, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert run_cell(one).loss == work.held_out(model)
    assert run_cell(replace(one, kind="alone")).loss == work.held_out(model)


def test_data_parallel_training_of_several_is_that_of_one_with_all_their_batches() -> None:
    many = cell(kind="data-parallel", preset="local_sgd")
    work = Digits(many.manifest, PEERS, 1.0)

    class All(Digits):
        def loss(self, module: nn.Module, rank: int, step: int) -> torch.Tensor:
            return torch.stack([work.loss(module, peer, step) for peer in range(PEERS)]).mean()

    from decentral.lab.running import run_together

    alone = run_together(replace(many, kind="alone"), All(many.manifest, PEERS, 1.0))
    together = run_cell(many)
    assert together.loss == pytest.approx(alone.points[-1].loss, rel=1e-5)
    assert together.curve is not None
    assert together.curve.points[-1].nbytes == ROUNDS * STEPS * 4 * together.curve.numel * 2 * 2 / 3


def test_an_average_that_is_learnt_is_what_a_reference_is_judged_by() -> None:
    plain = cell(kind="alone", preset="local_sgd")
    manifest = plain.manifest.changed(inner={"optimizer": "gpa", "averaging": 0.99, "mixing": 0.7})
    found = run_cell(Cell.of("alone", "digits", 3, manifest, steps=24, points=24, windows=0, text="", alpha=1.0))
    assert found.curve is not None
    losses = [point.loss for point in found.curve.points]
    assert losses == sorted(losses, reverse=True)  # what trains is not as steady


@pytest.mark.parametrize("preset", long_but(["noloco"], ["diloco", "sparseloco", "noloco"]))
def test_hours_by_steps_and_bytes_are_those_of_a_run_in_which_time_counts(preset: str) -> None:
    line = Link(name="home", rate_mbit=5, latency_ms=40, step_seconds=2, parameters=1e6).line
    free, timed = run_cell(cell(preset, peers=4)).curve, run_cell(cell(preset, peers=4, line=line)).curve
    assert free is not None
    assert timed is not None
    kind = preset_manifest(preset).exchange.kind
    for point, true in zip(free.points, timed.points, strict=True):
        assert line.hours(point, free.numel, 4, kind) * 3600 == pytest.approx(true.seconds, rel=0.02)
    assert [point.loss for point in free.points] == [point.loss for point in timed.points]


def test_replicas_that_differ_are_judged_one_by_one_and_as_their_mean() -> None:
    last = {preset: run_cell(cell(preset, peers=4)).curve.points[-1] for preset in ("noloco", "diloco")}  # type: ignore[union-attr]
    assert last["diloco"].loss_of_mean is None
    assert last["noloco"].loss_of_mean is not None
    assert 0 < last["noloco"].loss_of_mean < last["noloco"].loss


@pytest.mark.parametrize(("preset", "seeds"), [("variance_corrected", {0, 1, 2}), ("noloco", {0})])
def test_only_replicas_of_a_method_for_such_begin_apart(
    preset: str, seeds: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    built, make = set[int](), Digits.model

    def model(work: Digits, number: int = 0) -> nn.Module:
        built.add(number)
        return make(work, number)

    monkeypatch.setattr(Digits, "model", model)
    assert run_cell(cell(preset)).curve is not None
    assert built == seeds


def test_a_run_that_ends_in_no_number_is_told_as_such() -> None:
    found = run_cell(Cell.of("alone", "digits", 3, _exploding(), steps=40, points=4, windows=0, text="", alpha=1.0))
    assert (found.status, found.loss) == ("diverged", None)


def _exploding() -> object:
    rate = {"optimizer": "sgd", "learning_rate": 1e30, "steps": 1, "warmup": 0, "clip": None}
    return cell(kind="alone", preset="local_sgd").manifest.changed(inner=rate)


def test_a_cell_that_cannot_be_run_says_why_in_one_line() -> None:
    found = run_cell(replace(cell(), peers=1000))
    assert (found.status, found.loss) == ("failed", None)
    assert found.reason.startswith("1000 peers share 1437 digits")


@pytest.mark.parametrize(("steps", "points", "at"), [(6, 3, [2, 4, 6]), (7, 2, [4, 7]), (4, 9, [1, 2, 3, 4])])
def test_curves_have_evenly_spread_points_and_the_last_is_the_end(steps: int, points: int, at: list[int]) -> None:
    looks = Looks(steps, points)
    assert [step for step in range(1, steps + 1) if looks.due(step)] == at


@pytest.mark.parametrize("task", ["language", "language-uneven", "mixture"])
@pytest.mark.parametrize("kind", ["swarm", "data-parallel"])
@pytest.mark.parametrize("device", DEVICES)
def test_every_task_of_text_can_be_learnt(task: str, kind: str, device: str) -> None:
    manifest = preset_manifest(
        "local_sgd",
        run={"name": "lab", "salt": "lab", "seed": 7, "rounds": 2 if kind == "swarm" else 20},
        model={"hidden": 16, "layers": 1, "heads": 2, "context": 16} | ({"experts": 2} if task == "mixture" else {}),
        data={"batch_size": 2},
        inner={"steps": 10 if kind == "swarm" else 1, "warmup": 2, "learning_rate": 0.01},
    )
    cell = Cell.of(kind, task, 2, manifest, steps=20, points=2, windows=8, text="")  # type: ignore[arg-type]
    found = run_cell(cell, device)
    assert found.status == "done", found.reason
    assert found.device == device
    assert Outcome.from_json(found.to_json()).device == found.device
    assert found.curve is not None
    assert [point.tokens for point in found.curve.points] == [0, 320, 640]
    assert found.loss is not None
    assert found.loss < 7
