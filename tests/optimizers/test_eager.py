"""Eager updates: the paper's recursion with one anchor for all, and a live model that always finds its way back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from decentral.optimizers import OuterMethod, carry
from decentral.optimizers.diloco import DiLoCo
from decentral.optimizers.eager import Eager
from decentral.optimizers.streaming import StreamingDiLoCo
from decentral.state.snapshot import anchor_name
from decentral.training.live_model import LiveModel
from decentral.training.progress import pseudo_gradient
from decentral.training.schedule import SyncSchedule, memory_of, resume, tensors_of
from tests.kit.learners import Learners
from tests.kit.replicas import NUMEL

H, LR, MU = 3, 0.4, 0.9
PEERS = (0, 1, 2)


def randn(seed: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


CURVATURE = randn(50).abs()
BEST = [randn(60 + n) for n in PEERS]


def towards(n: int, live_N: Tensor) -> Tensor:
    """An inner step of peer ``n``: it depends on where the peer is, so where that was shows ever after."""
    return 0.05 * CURVATURE * (BEST[n] - live_N)


def begun(peers: int, method: OuterMethod | None = None, overlap: int = H) -> Learners:
    run = Learners(method or Eager(LR, MU), peers, randn(0))
    for peer in run.peers:
        peer.schedule.timing.overlap, peer.schedule.timing.interval = overlap, H
        peer.schedule.live.own(0)["peers"] = torch.tensor([float(peers)])  # as after a commit
    return run


def learn(run: Learners, steps: int = H) -> None:
    for _ in range(steps):
        run.learn({n: towards(n, peer.live_N) for n, peer in enumerate(run.peers)})


def test_live_models_go_where_the_papers_replicas_go():
    """A contribution at the end of a round, its commit at the end of the next, as in the paper."""
    run, flying = begun(3), None
    outer = [randn(0).double() for _ in PEERS]
    momentum, before = ([torch.zeros(NUMEL, dtype=torch.float64) for _ in PEERS] for _ in range(2))
    for _ in range(6):
        learn(run)
        if flying is not None:
            run.commit(flying)
        flying = run.offer(PEERS)
        changes = []
        for n in PEERS:
            local = outer[n]
            for _ in range(H):
                local = local + 0.05 * CURVATURE.double() * (BEST[n].double() - local)
            changes.append(outer[n] - local)
        known = sum(before) / 3  # the average of the round before
        for n in PEERS:
            eager = changes[n] / 3 + (known - before[n] / 3)
            momentum[n] = MU * momentum[n] + eager
            outer[n] = outer[n] - LR * (eager + MU * momentum[n])
        before = changes
        for peer, wanted in zip(run.peers, outer, strict=True):
            torch.testing.assert_close(peer.live_N.double(), wanted, rtol=0, atol=1e-5)
        assert not torch.equal(run.peers[0].live_N, run.peers[1].live_N)
        assert torch.equal(run.peers[0].anchor_N, run.peers[1].anchor_N)


def test_a_sole_peer_goes_as_diloco_without_delay():
    late, prompt, flying = begun(1), begun(1, DiLoCo(LR, MU), overlap=0), None
    for _ in range(6):
        learn(late)
        if flying is not None:
            late.commit(flying)
        flying = late.offer((0,))
        learn(prompt)
        prompt.meet((0,))
        torch.testing.assert_close(late.peers[0].live_N, prompt.peers[0].live_N, rtol=0, atol=1e-5)


def test_the_anchor_is_dilocos_whatever_peers_do_meanwhile():
    runs = [begun(3), begun(3, StreamingDiLoCo(LR, MU, alpha=0.5))]
    for number in range(4):
        for run in runs:
            for n, peer in enumerate(run.peers):  # one change for both: where they stand differs
                peer.model.write(0, peer.anchor_N + 0.01 * randn(10 * number + n))
                peer.schedule.stepped()
            run.meet(PEERS)
    assert torch.equal(runs[0].peers[0].anchor_N, runs[1].peers[0].anchor_N)


def test_where_a_round_is_waited_for_it_is_diloco():
    runs = [begun(3, method, overlap=0) for method in (Eager(LR, MU), DiLoCo(LR, MU))]
    for _ in range(4):
        for run in runs:
            learn(run)
            run.meet(PEERS)
    assert torch.equal(runs[0].peers[0].live_N, runs[1].peers[0].live_N)


def test_a_peer_that_knows_no_commit_trains_on_from_where_it_is():
    run = begun(3)
    del run.peers[0].schedule.live.own(0)["peers"]
    learn(run)
    before = [peer.live_N for peer in run.peers]
    run.offer(PEERS)
    assert torch.equal(run.peers[0].live_N, before[0])
    assert not torch.equal(run.peers[1].live_N, before[1])


def test_with_no_inner_step_in_between_a_commit_leaves_the_anchor_bit_for_bit():
    run = begun(3)
    for _ in range(3):
        learn(run)
        run.commit(run.offer(PEERS))
        assert all(torch.equal(peer.live_N, peer.anchor_N) for peer in run.peers)


def test_what_was_learnt_meanwhile_is_carried_on_and_where_it_began_is_not():
    run = begun(3)
    learn(run)
    offered = run.offer(PEERS)
    on_the_way = [peer.live_N for peer in run.peers]
    learn(run, 2)
    learnt = [peer.live_N - began for peer, began in zip(run.peers, on_the_way, strict=True)]
    run.commit(offered)
    for peer, learnt_N in zip(run.peers, learnt, strict=True):
        torch.testing.assert_close(peer.live_N, peer.anchor_N + learnt_N, rtol=0, atol=1e-6)


@pytest.mark.parametrize("fate", ["withdrawn", "passed by"])
def test_a_contribution_that_no_commit_takes_is_progress_as_before(fate: str):
    """Peers 0 and 1 go on; what peer 2 had in flight is all in its next contribution."""
    run = begun(3)
    learn(run)
    learnt_N = run.peers[2].live_N - run.peers[2].anchor_N
    offered = run.offer(PEERS)
    began_N = run.peers[2].live_N
    learn(run, 1)
    learnt_N += run.peers[2].live_N - began_N
    if fate == "withdrawn":
        run.peers[2].schedule.timing.withdraw()
    else:
        offered.made.pop(2)
        left = tuple(ref for ref in offered.record.frames if ref.peer != run.peers[2].schedule.live.peer)
        offered.record = run._record(left)
        run.commit(offered)
        torch.testing.assert_close(run.peers[2].live_N, run.peers[2].anchor_N + learnt_N, rtol=0, atol=1e-6)
        run.peers[2].schedule.progress[0].missed = 0  # else it would be bounded, which is not the question here
    again = run.offer((2,)).made[2]
    torch.testing.assert_close(again.gradient_N, -learnt_N, rtol=0, atol=1e-6)


def test_a_round_without_a_peer_lets_its_own_momentum_decay_and_one_with_it_adds_its_change():
    run = begun(3)
    learn(run)
    change_N = run.peers[2].anchor_N - run.peers[2].live_N
    run.commit(run.offer(PEERS))
    own = run.peers[2].schedule.live.own(0)
    assert torch.equal(own["momentum"], change_N)
    learn(run)
    run.commit(run.offer((0, 1)))
    assert torch.equal(own["momentum"], change_N * MU)
    assert set(own) == {"momentum", "peers"}
    assert int(run.peers[0].schedule.live.own(0)["peers"]) == 2


def test_a_peer_that_resumes_on_its_way_has_the_progress_that_it_had():
    run = begun(3)
    learn(run)
    run.commit(run.offer(PEERS))
    learn(run)
    offered = run.offer(PEERS)
    learn(run, 1)
    peer = run.peers[0]
    kept = {name: one.clone() for name, one in tensors_of(peer.schedule).items()} | {anchor_name(0): peer.anchor_N}
    memory, live_N = memory_of(peer.schedule), peer.live_N
    resumed = run.begun(0)
    resumed.model.write(0, live_N)
    resume(resumed.schedule, resumed.model, kept, memory, [peer.anchor_N], 0)
    progress_N = resumed.live_N - peer.anchor_N
    run.commit(offered)
    wanted_N = peer.live_N - peer.anchor_N - offered.made[0].gradient_N  # what it sent, and what it learnt since
    torch.testing.assert_close(progress_N, wanted_N, rtol=0, atol=1e-6)


def test_rounding_of_a_detour_in_bfloat16_is_no_progress():
    """What a model of less than float32 holds of the way there is what is taken out again."""
    model = LiveModel(torch.nn.Linear(8, 8, bias=False).to(torch.bfloat16), 1, None)
    schedule = SyncSchedule(1, 1, Eager(LR, MU), bytes(32))
    schedule.live.own(0).update(peers=torch.tensor([3.0]), momentum=randn(1)[:64])
    anchor_N = randn(2)[:64]
    schedule.put(model, 0, anchor_N)
    written_N = model.read(0)
    for _ in range(3):
        schedule.stepped()
        made = schedule.take(model, 0, anchor_N, bytes(32), 1, outer_step=0)
        assert made is not None
        assert not made.gradient_N.any()
        assert not torch.equal(model.read(0), written_N)
        schedule.timing.withdraw()


def test_nor_is_it_where_a_restart_takes_the_detour_out_again():
    module, anchor_N = torch.nn.Linear(8, 8, bias=False).to(torch.bfloat16), randn(2)[:64]
    model, schedule = LiveModel(module, 1, None), SyncSchedule(1, 1, Eager(LR, MU), bytes(32))
    schedule.live.own(0).update(peers=torch.tensor([3.0]), momentum=randn(1)[:64])
    schedule.put(model, 0, anchor_N)
    schedule.stepped()
    assert schedule.take(model, 0, anchor_N, bytes(32), 1, outer_step=0) is not None
    begun_N = model.read(0)
    with torch.no_grad():
        module.weight -= 0.125
    learnt_N = begun_N - model.read(0)
    resumed = SyncSchedule(1, 1, Eager(LR, MU), bytes(32))
    resume(resumed, model, {**tensors_of(schedule), anchor_name(0): anchor_N}, memory_of(schedule), [anchor_N], 0)
    torch.testing.assert_close(
        pseudo_gradient(resumed.progress[0], anchor_N, model.read(0)), learnt_N, rtol=0, atol=1e-6
    )


def test_a_restart_from_the_anchor_leaves_no_detour():
    run = begun(3)
    learn(run)
    run.offer(PEERS)
    peer = run.peers[0]
    peer.schedule.timing.withdraw()
    peer.schedule.restart(peer.model, [peer.anchor_N], [0])
    assert torch.equal(peer.live_N, peer.anchor_N)
    peer.schedule.stepped()
    again = peer.schedule.take(peer.model, 0, peer.anchor_N, bytes(32), 1, outer_step=0)
    assert again is not None
    assert not again.gradient_N.any()


def test_other_ranks_are_told_of_what_a_contribution_moved_and_once():
    run = begun(1)
    learn(run)
    run.offer((0,))
    assert run.peers[0].schedule.collect_written() == {0}
    assert run.peers[0].schedule.collect_written() == set()


def test_a_detour_is_shorter_than_the_way_of_a_peer_that_only_follows_itself():
    """What it is for: the mean distance to the anchor that is to come."""
    gaps = {}
    for name, method in (("eager", Eager(LR, MU)), ("carry", DiLoCo(LR, MU))):
        run, gaps[name] = begun(3, method), 0.0
        for _ in range(8):
            learn(run)
            offered = run.offer(PEERS)
            stands = [peer.live_N for peer in run.peers]
            run.commit(offered)
            gaps[name] += sum(float((one - run.peers[0].anchor_N).norm()) for one in stands)
    assert gaps["eager"] < gaps["carry"]


def test_a_merge_by_carry_is_what_the_way_back_is():
    left, begun_N, live = randn(1), randn(2), randn(3)
    assert torch.equal(carry(begun_N, begun_N, left), left)
    torch.testing.assert_close(carry(live, begun_N, left) - left, live - begun_N, rtol=0, atol=1e-5)
