"""Runs of the laboratory: every method trains a small language model on several replicas, by its own preset."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from decentral.lab.lockstep import lockstep_of
from decentral.lab.work import Language, OneByOne
from decentral.manifest import Manifest, check_methods, preset_manifest
from decentral.optimizers import presets
from decentral.trial.course import Course, Reached
from decentral.trial.replicas import TrialWorld, trial_peers
from tests.kit.tables import GOSSIPS, PRESETS, WIRES, long_but
from tests.lab.declared import PEERS, SIZE, corpus

ROUNDS, STEPS = 4, 4


def terms(name: str) -> Manifest:
    fragments = presets()[name].fragments
    model = SIZE | {"layers": fragments} | ({"experts": 2} if presets()[name].model.get("experts") else {})
    manifest = preset_manifest(
        name,
        run={"salt": "lab", "rounds": ROUNDS * fragments},
        model=model,
        data={"batch_size": 2},
        inner={"steps": STEPS * fragments, "warmup": 1},
    )
    check_methods(manifest)
    return manifest


def course_of(manifest: Manifest, world: TrialWorld | None = None) -> Course:
    work = Language(manifest, corpus(), PEERS, uneven=False, windows=8)
    modules = [work.model() for _ in range(PEERS)]
    peers, trained = trial_peers(manifest, modules), work.trained(modules)
    return Course(work, peers, trained, world or TrialWorld(PEERS), lockstep_of(peers, trained))


def gone(manifest: Manifest, world: TrialWorld | None = None) -> tuple[Course, list[Reached]]:
    course = course_of(manifest, world)
    return course, list(course.go())


def flat(parameters: Iterable[Tensor]) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in parameters]).sort().values


@pytest.mark.parametrize("name", long_but(WIRES, PRESETS))
def test_every_method_makes_its_rounds_and_moves_an_anchor_that_all_who_agree_hold_alike(name: str) -> None:
    course, reached = gone(terms(name))
    assert [one.outer_step for one in reached] == list(range(1, course.manifest.run.rounds + 1))
    anchors = course.peers[0].replica.anchors
    assert flat(anchors).isfinite().all()
    assert not torch.equal(flat(anchors), flat(course.work.model().parameters()))
    digests = {peer.replica.digest for peer in course.peers}
    assert len(digests) == 1 or name in GOSSIPS


def test_the_same_run_gives_the_same_bits() -> None:
    first, second = (gone(terms("sparseloco"))[0] for _ in range(2))
    assert first.peers[0].replica.digest == second.peers[0].replica.digest


@pytest.mark.parametrize("name", long_but(["sparseloco"], ["diloco", "sparseloco", "noloco"]))
def test_training_learns(name: str) -> None:
    course = course_of(terms(name).changed(run={"rounds": 20}))
    before = course.work.held_out(course.peers[0].module)
    assert list(course.go())
    assert course.work.held_out(course.peers[0].module) < before - 0.3  # bits per byte, of 8


def test_a_replica_that_shares_its_storage_gets_the_gradients_of_one_that_does_not() -> None:
    manifest = terms("diloco")
    work = Language(manifest, corpus(), PEERS, uneven=False)
    together, apart = ([work.model() for _ in range(PEERS)] for _ in range(2))
    steps = {0: 3, 2: 5}
    losses, others = work.trained(together).backward(steps), OneByOne(work, apart).backward(steps)
    for rank in steps:
        torch.testing.assert_close(losses[rank], others[rank])
        for mine, other in zip(together[rank].parameters(), apart[rank].parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-6)
    assert all(parameter.grad is None for parameter in together[1].parameters())


def test_a_round_takes_the_time_of_its_slowest_peer_where_all_are_waited_for() -> None:
    usual, slowed = gone(terms("diloco"))[1], gone(terms("diloco"), TrialWorld(PEERS, slow=3.0))[1]
    assert slowed[-1].seconds == 3 * usual[-1].seconds


@pytest.mark.parametrize("name", ["sparseloco", "diloco", "noloco"])
def test_bytes_take_the_time_of_the_line(name: str) -> None:
    """In a gather, in a reduce, and in a pair: of three peers one has no partner, and the others wait for a pair."""
    manifest, rate = terms(name), 1e5
    free, paid = gone(manifest)[1], gone(manifest, TrialWorld(PEERS, rate=rate))[1]
    share = 2 / 3 if name in GOSSIPS else 1.0  # of the peers that send, over whom bytes are averaged
    sent = sum(one.nbytes for one in paid) / share / rate
    assert paid[-1].seconds - free[-1].seconds == pytest.approx(sent, rel=0.05)


def test_uneven_shares_of_the_text_do_not_meet() -> None:
    work = Language(terms("diloco"), corpus(), PEERS, uneven=True)
    third = corpus().train.numel() // PEERS
    text = corpus().train
    for rank in range(PEERS):
        part = text[third * rank : third * (rank + 1)].numpy().tobytes()
        assert all(bytes(window.tolist()) in part for window in work.tokens(rank, 7))
