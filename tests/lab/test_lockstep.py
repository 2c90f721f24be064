"""Steps of all replicas at once are those that each makes by itself, with every inner optimizer that has gradients."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from decentral.lab.lockstep import StackedMuon, clip_each, lockstep_of
from decentral.lab.work import Language, Trained
from decentral.manifest import Manifest, preset_manifest
from decentral.manifest.terms import INNER_OPTIMIZERS
from decentral.trial.course import Course
from decentral.trial.replicas import TrialPeer, TrialWorld, trial_peers
from tests.kit.tables import long_but
from tests.lab.declared import PEERS, SIZE, corpus

STEPS, ROUNDS = 10, 2
WITH_GRADIENTS = sorted(name for name, one in INNER_OPTIMIZERS.items() if not one.forward_only)


def terms(preset: str = "diloco", **inner: object) -> Manifest:
    return preset_manifest(
        preset,
        run={"salt": "lab", "rounds": ROUNDS},
        model=SIZE,
        data={"batch_size": 2},
        inner={"steps": STEPS, "warmup": 4, "learning_rate": 0.01} | inner,
        compressor={"chain": "none"},
    )


class Apart:
    """Gradients as of stacked weights, and a step of each replica by itself."""

    def __init__(self, trained: Trained) -> None:
        self.stacked: Mapping[str, Tensor] = {}
        self.backward, self.gradients, self.hand_out = trained.backward, trained.gradients, trained.hand_out


def course_of(manifest: Manifest, *, stacked: bool) -> Course:
    work = Language(manifest, corpus(), PEERS, uneven=False, windows=8)
    modules = [work.model() for _ in range(PEERS)]
    trained = work.trained(modules)
    peers, trained = trial_peers(manifest, modules), trained if stacked else Apart(trained)
    return Course(work, peers, trained, TrialWorld(PEERS), lockstep_of(peers, trained))


def assert_same(some: list[TrialPeer], others: list[TrialPeer], tolerance: float = 1e-5) -> None:
    for one, other in zip(some, others, strict=True):
        for mine, theirs in zip(one.live.read_all(), other.live.read_all(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("optimizer", long_but(["adamw", "muon"], WITH_GRADIENTS))
def test_after_twenty_steps_and_two_rounds_replicas_are_where_their_own_optimizers_take_them(optimizer: str) -> None:
    stacked, apart = (course_of(terms(optimizer=optimizer), stacked=one) for one in (True, False))
    for course in (stacked, apart):
        assert len(list(course.go())) == ROUNDS
        assert {peer.steps for peer in course.peers} == {STEPS * ROUNDS}
    tolerance = 5e-3 if optimizer == "muon" else 1e-5  # its bfloat16 makes 1e-3 of a last bit of the others' weights
    assert_same(stacked.peers, apart.peers, tolerance)


def test_muon_of_stacked_matrices_is_torchs_of_each() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((16, 16), (48, 16), (16, 48)):
        stacked = torch.randn(PEERS, *shape, generator=generator)
        each = [nn.Parameter(row.clone()) for row in stacked]
        one = torch.optim.Muon(each, lr=0.01, weight_decay=0.1, nesterov=False, adjust_lr_fn="match_rms_adamw")
        together = StackedMuon([stacked.requires_grad_()], one)
        for _ in range(3):
            stacked.grad = torch.randn(PEERS, *shape, generator=generator)
            for parameter, gradient in zip(each, stacked.grad, strict=True):
                parameter.grad = gradient.clone()
            one.step()
            together.step()
        torch.testing.assert_close(stacked.detach(), torch.stack([p.detach() for p in each]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("preset", ["scaffold", "mt_dao", "des_loc"])
def test_methods_that_read_gradients_and_moments_find_them(preset: str) -> None:
    stacked, apart = (course_of(terms(preset), stacked=one) for one in (True, False))
    assert len(list(stacked.go())) == len(list(apart.go())) == ROUNDS
    assert_same(stacked.peers, apart.peers)


@pytest.mark.parametrize("optimizer", long_but(["adamw", "muon"], WITH_GRADIENTS))
def test_replicas_that_stepped_together_go_on_by_themselves_as_if_they_always_had(optimizer: str) -> None:
    stacked, apart = (course_of(terms(optimizer=optimizer), stacked=one) for one in (True, False))
    lockstep = lockstep_of(stacked.peers, stacked.trained)
    assert lockstep is not None
    for _ in range(2):
        lockstep.step([1.0] * PEERS)
    lockstep.dissolve()
    for course, steps in ((stacked, 3), (apart, 5)):
        for _ in range(steps):
            step_alone(course)
    assert_same(stacked.peers, apart.peers)


def step_alone(course: Course) -> None:
    losses = course.trained.backward({peer.rank: peer.steps for peer in course.peers})
    for peer in course.peers:
        peer.step(lambda rank=peer.rank: losses[rank], lambda loss: None, 1.0)  # type: ignore[misc]


def test_the_gradients_of_each_replica_are_clipped_as_torch_does() -> None:
    shapes: Mapping[str, tuple[int, ...]] = {"matrix": (4, 3), "vector": (5,)}
    given = [
        torch.randn(PEERS, *shape) * 10.0 ** torch.arange(-2, 1).view(-1, *[1] * len(shape))
        for shape in shapes.values()
    ]
    wanted = [one.clone() for one in given]
    clip_each(given, 1.0)
    for rank in range(PEERS):
        held = [nn.Parameter(torch.zeros(shape)) for shape in shapes.values()]
        for parameter, gradient in zip(held, wanted, strict=True):
            parameter.grad = gradient[rank]
        nn.utils.clip_grad_norm_(held, 1.0)
    for mine, other in zip(given, wanted, strict=True):
        torch.testing.assert_close(mine, other)
