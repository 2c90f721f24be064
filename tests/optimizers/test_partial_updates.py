"""Partial parameter updates: what stands still, who counts where, and which slice is whose."""

from __future__ import annotations

import struct
from collections import Counter

import pytest
import torch
from torch import nn

from decentral.errors import ConfigError
from decentral.manifest import check_methods, preset_manifest
from decentral.optimizers import Contributor, RoundInfo
from decentral.optimizers.owners import scale_to_owners
from decentral.optimizers.partial_updates import PartialUpdates
from decentral.training.live_model import LiveModel
from decentral.training.live_side import LiveSide, Moments
from decentral.training.schedule import SyncSchedule
from tests.kit.learners import Learner, Learners
from tests.kit.replicas import NUMEL
from tests.optimizers.owning import randn, span

PEERS = (0, 1, 2)


def slice_of(method: PartialUpdates, peer: Learner) -> int:
    (said,) = struct.unpack("<H", method.says(peer.schedule.live, 0, []))
    return int(said)


def says(*slices: int) -> tuple[Contributor, ...]:
    return tuple(Contributor(bytes([n]) * 32, summary=struct.pack("<H", one)) for n, one in enumerate(slices))


def learn_and_meet(run: Learners, rounds: int, present: tuple[int, ...] = PEERS, seed: int = 0) -> Learners:
    for number in range(rounds):
        run.learn({n: 0.01 * randn(100 * seed + 10 * number + n) for n in present})
        run.meet(present)
    return run


def test_only_its_own_slice_of_a_peer_moves_whatever_the_inner_optimizer_does():
    torch.manual_seed(0)
    model, method = nn.Linear(8, 6), PartialUpdates(slices=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)  # it decays what has no gradient, too
    live = LiveModel(model, 1, None)
    side = LiveSide(live, Moments(live, [optimizer]), bytes(32), live.schema)
    schedule = SyncSchedule(4, 0, method, bytes(32), live=side)
    side.own(0)["slice"] = torch.tensor([1.0])
    before_N = live.read(0)
    for _ in range(3):
        model(torch.ones(2, 8)).square().sum().backward()
        schedule.calls.before_step()
        optimizer.step()
        schedule.stepped()
    moved = live.read(0) != before_N
    own = span(method, 1, len(before_N))
    assert moved[own].all()
    assert int(moved.sum()) == int(moved[own].sum())
    assert set(side.own(0)) == {"slice"}


def test_a_coordinate_is_divided_by_the_number_of_its_owners():
    method, numel = PartialUpdates(lr=1.0, momentum=0.0, slices=3), 9
    rows = torch.zeros(4, numel)
    for n, own in enumerate((0, 0, 2, 0)):
        rows[n, span(method, own, numel)] = float(n + 1)
    received = {"change": rows.mean(0)}
    info = RoundInfo(0, says(0, 0, 2, 0), (1.0,) * 4)
    after, _ = method.outer_step(torch.zeros(numel), received, method.init(torch.zeros(numel)), info)
    torch.testing.assert_close(after, -torch.tensor([(1 + 2 + 4) / 3] * 3 + [0.0] * 3 + [3.0] * 3))


def test_weights_count_among_the_owners():
    rows, weights = torch.tensor([[2.0, 0.0], [8.0, 0.0], [0.0, 5.0]]), (1.0, 3.0, 4.0)
    mean_N = (rows * torch.tensor(weights)[:, None]).sum(0) / sum(weights)
    mean, owned = scale_to_owners(mean_N, [[(0, 1)], [(1, 2)]], [{0}, {0}, {1}], weights)
    torch.testing.assert_close(mean, torch.tensor([(2 + 24) / 4, 5.0]))
    assert owned.all()


def test_a_slice_without_an_owner_keeps_anchor_and_momentum():
    method, anchor = PartialUpdates(slices=2), randn(0)
    state = method.init(anchor) | {"momentum": randn(1)}
    change = torch.zeros(NUMEL)
    change[span(method, 0)] = randn(2)[span(method, 0)]
    after, kept = method.outer_step(anchor, {"change": change}, state, RoundInfo(0, says(0, 0), (1.0, 1.0)))
    assert torch.equal(after[span(method, 1)], anchor[span(method, 1)])
    assert torch.equal(kept["momentum"][span(method, 1)], state["momentum"][span(method, 1)])
    assert not torch.equal(after[span(method, 0)], anchor[span(method, 0)])


@pytest.mark.parametrize(("slices", "peers"), [(2, 3), (3, 3)])
def test_after_one_round_slices_have_equally_many_owners_and_keep_them(slices: int, peers: int):
    method = PartialUpdates(slices=slices)
    run = learn_and_meet(Learners(method, peers, randn(0)), 1)
    owners = [slice_of(method, peer) for peer in run.peers]
    assert sorted(Counter(owners).values()) == ([1, 2] if slices == 2 else [1, 1, 1])
    learn_and_meet(run, 3, seed=1)
    assert [slice_of(method, peer) for peer in run.peers] == owners


def test_with_fewer_peers_than_slices_all_slices_get_their_turn():
    method = PartialUpdates(slices=5)
    run, seen = learn_and_meet(Learners(method, 3, randn(0)), 1, (0, 1)), Counter[int]()
    for number in range(5):
        owners = [slice_of(method, run.peers[n]) for n in (0, 1)]
        assert len(set(owners)) == 2
        seen.update(owners)
        learn_and_meet(run, 1, (0, 1), seed=number)
    assert seen == Counter(dict.fromkeys(range(5), 2))


def test_a_slice_changes_with_a_commit_that_took_the_contribution_and_with_no_other():
    method = PartialUpdates(slices=3)
    run = learn_and_meet(Learners(method, 3, randn(0)), 2)
    before = [slice_of(method, peer) for peer in run.peers]
    run.learn({n: 0.01 * randn(n) for n in PEERS})
    run.offer(PEERS)
    assert [slice_of(method, peer) for peer in run.peers] == before
    learn_and_meet(run, 1, (1, 2))
    assert [slice_of(method, peer) for peer in run.peers] == [before[0], 2, 0]  # two peers: they move on, by two


@pytest.mark.parametrize("said", [b"", b"\x00", struct.pack("<H", 2), struct.pack("<H", 65535), bytes(64)])
def test_who_names_no_slice_counts_nothing(said: bytes):
    method = PartialUpdates(slices=2)
    told = (*says(0, 1), Contributor(b"z" * 32, summary=said))
    assert method.weights(told, (1.0, 2.0, 3.0), {}) == [1.0, 2.0, 0.0]


def test_what_peers_send_of_slices_that_are_not_theirs_is_zero():
    method = PartialUpdates(slices=3)
    run = learn_and_meet(Learners(method, 3, randn(0)), 3)
    run.learn({n: 0.01 * randn(n) for n in PEERS})
    for n, made in run.offer(PEERS).made.items():
        own = span(method, slice_of(method, run.peers[n]))
        assert int((made.gradient_N != 0).sum()) == int((made.gradient_N[own] != 0).sum()) > 0


def test_steps_along_all_parameters_at_once_are_refused_with_the_terms():
    inner = {"optimizer": "spsa", "weight_decay": 0.0, "clip": None}
    with pytest.raises(ConfigError, match="those that a peer does not train are only noise"):
        check_methods(preset_manifest("partial_updates", inner=inner))
