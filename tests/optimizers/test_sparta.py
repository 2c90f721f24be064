"""SPARTA: who averages what, what stays a peer's own, and that it is the code's algorithm with another draw."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from decentral.optimizers import OuterMethod
from decentral.optimizers.sparta import Sparta
from tests.kit.learners import Learners
from tests.kit.replicas import NUMEL

PEERS = (0, 1, 2)


def randn(seed: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def mask(method: Sparta, step: int, numel: int = NUMEL) -> Tensor:
    places = method.drawn(step).places
    return torch.ones(numel, dtype=torch.bool) if places is None else places(numel)


def learn(run: Learners, number: int, present: Sequence[int] = PEERS) -> None:
    run.learn({n: 0.01 * randn(10 * number + n) for n in present})


def walked(method: OuterMethod, rounds: int) -> Learners:
    run = Learners(method, 3, randn(0))
    for number in range(rounds):
        learn(run, number)
        run.meet(PEERS)
    return run


@pytest.mark.parametrize("numel", [1, 199, 1000, 10_001])
def test_each_parameter_is_drawn_once_in_every_pass_and_about_as_many_in_every_round(numel: int):
    method = Sparta(parts=200, whole=0)
    for first in (0, 200):
        drawn = torch.stack([mask(method, first + step, numel) for step in range(200)])
        assert torch.equal(drawn.sum(0), torch.ones(numel, dtype=torch.int64))
        counts = drawn.sum(1)
        assert int(counts.max()) <= -(-numel // 200)
        assert int(counts.min()) >= numel // 200


def test_a_draw_differs_from_run_to_run_and_from_pass_to_pass():
    method = Sparta(parts=50, whole=0)
    places = [mask(method, step, 5000).nonzero().flatten() % 50 for step in (0, 50)]
    assert all(len(set(one.tolist())) > 30 for one in places)
    assert int((places[0] == places[1]).sum()) < 10


def test_a_draw_is_golden():
    """It is what peers agree on without a word: another version must not draw others."""
    assert mask(Sparta(parts=7, whole=0), 12345, 40).nonzero().flatten().tolist() == GOLDEN


GOLDEN = [6, 13, 17, 24, 34, 39]


@pytest.mark.parametrize("whole", [0, 4])
def test_live_models_are_those_of_the_codes_loop(whole: int):
    """gym's: all take the mean where it is drawn, and every whole-th time a DiLoCo step of the mean of all."""
    method = Sparta(parts=5, whole=whole, lr=0.7, momentum=0.9)
    run, live = Learners(method, 3, randn(0)), [randn(0).double() for _ in PEERS]
    master, momentum = randn(0).double(), torch.zeros(NUMEL, dtype=torch.float64)
    for number in range(11):
        learn(run, number)
        run.meet(PEERS)
        live = [one + 0.01 * randn(10 * number + n).double() for n, one in enumerate(live)]
        mean = torch.stack(live).mean(0)
        if whole and (number + 1) % whole == 0:
            gradient = master - mean
            momentum = 0.9 * momentum + gradient
            master = master - 0.7 * (gradient + 0.9 * momentum)
            live = [master.clone() for _ in PEERS]
        else:
            live = [torch.where(mask(method, number), mean, one) for one in live]
        for peer, wanted in zip(run.peers, live, strict=True):
            torch.testing.assert_close(peer.live_N.double(), wanted, rtol=0, atol=1e-6)


def test_a_round_moves_nothing_that_is_not_drawn_and_leaves_it_to_each_peer():
    method = Sparta(parts=10, whole=0)
    run = walked(method, 3)
    before_N, live = run.peers[0].anchor_N, [peer.live_N for peer in run.peers]
    learn(run, 3)
    steps = [0.01 * randn(30 + n) for n in PEERS]
    run.meet(PEERS)
    others_N = ~mask(method, 3)
    assert torch.equal(run.peers[0].anchor_N[others_N], before_N[others_N])
    assert not torch.equal(run.peers[0].anchor_N, before_N)
    for peer, was_N, step_N in zip(run.peers, live, steps, strict=True):
        torch.testing.assert_close(peer.live_N[others_N], (was_N + step_N)[others_N], rtol=0, atol=1e-6)
        assert torch.equal(peer.live_N[~others_N], peer.anchor_N[~others_N])


def test_what_peers_send_is_zero_where_nothing_is_drawn():
    run = walked(Sparta(parts=10, whole=0), 3)
    learn(run, 3)
    for made in run.offer(PEERS).made.values():
        assert torch.equal(made.gradient_N != 0, mask(Sparta(parts=10, whole=0), 3))


def test_who_misses_a_round_keeps_all_of_its_progress_and_the_others_go_on():
    method = Sparta(parts=4, whole=0)
    run = walked(method, 2)
    live_N, anchor_N = run.peers[2].live_N, run.peers[2].anchor_N
    learn(run, 2)
    run.meet((0, 1))
    moved_N = run.peers[0].anchor_N - anchor_N
    wanted_N = live_N + 0.01 * randn(22) + moved_N
    torch.testing.assert_close(run.peers[2].live_N, wanted_N, rtol=0, atol=1e-6)


def distances(whole: int, rounds: int = 100) -> tuple[float, float]:
    """From the optimum of three peers' quadratics, after so many rounds: of the anchor, and of a peer's live model."""
    run, curvature_N = Learners(Sparta(parts=40, whole=whole, momentum=0.0, lr=1.0), 3, randn(0)), randn(1).abs()
    best = [0.1 * randn(7 + n) for n in PEERS]
    middle_N = torch.stack(best).mean(0)
    for _ in range(rounds):
        steps = {n: 0.02 * curvature_N * (best[n] - run.peers[n].live_N) for n in PEERS}
        run.learn(steps)
        run.meet(PEERS)
    return float((run.peers[0].anchor_N - middle_N).norm()), float((run.peers[0].live_N - middle_N).norm())


def test_without_whole_rounds_an_anchor_is_behind_the_live_models_and_with_them_it_is_not():
    patched, live = distances(whole=0)
    whole, after = distances(whole=20)
    assert whole == after
    assert patched > 1.1 * live
    assert whole < live
