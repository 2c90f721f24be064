"""SCAFFOLD: the paper's equations on quadratics, who counts for x and who for c, and what an absence leaves behind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.manifest import check_methods, preset_manifest
from decentral.optimizers import Contributor, RoundInfo
from decentral.optimizers.scaffold import Scaffold
from tests.kit.learners import Learners
from tests.kit.replicas import NUMEL
from tests.kit.tables import method_of

RATE, STEPS, PEERS = 0.1, 5, (0, 1, 2)


def randn(seed: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


class Quadratics:
    """Peer n has the loss sum a_n (x - b_n)^2 / 2: other curvatures, other minima."""

    def __init__(self) -> None:
        self.curvature = [0.5 + randn(n).square().clamp(max=4) for n in PEERS]
        self.minimum = [randn(10 + n) for n in PEERS]

    def gradient(self, n: int, x_N: Tensor) -> Tensor:
        return self.curvature[n].to(x_N) * (x_N - self.minimum[n].to(x_N))

    @property
    def best_N(self) -> Tensor:
        """The minimum of the sum of all."""
        whole = zip(self.curvature, self.minimum, strict=True)
        return sum(a_N * b_N for a_N, b_N in whole) / sum(self.curvature)  # type: ignore[return-value]


def trained(method: str, rounds: int, present: tuple[int, ...] = PEERS) -> Learners:
    run, task = Learners(method_of(method), 3, torch.zeros(NUMEL)), Quadratics()
    for peer in run.peers:
        peer.schedule.timing.interval = STEPS
    for _ in range(rounds):
        for _ in range(STEPS):
            run.learn({n: -RATE * task.gradient(n, run.peers[n].live_N) for n in PEERS})
        run.meet(present)
    return run


def papers(rounds: int) -> Tensor:
    """Karimireddy et al., algorithm 1 with option II, all clients in every round, in float64."""
    task, x_N = Quadratics(), torch.zeros(NUMEL, dtype=torch.float64)
    c_N, own = torch.zeros_like(x_N), [torch.zeros_like(x_N) for _ in PEERS]
    for _ in range(rounds):
        local = [x_N.clone() for _ in PEERS]
        for n in PEERS:
            for _ in range(STEPS):
                local[n] = local[n] - RATE * (task.gradient(n, local[n]) - own[n] + c_N)
        new = [own[n] - c_N + (x_N - local[n]) / (STEPS * RATE) for n in PEERS]
        c_N = c_N + sum(b - a for a, b in zip(own, new, strict=True)) / len(PEERS)
        x_N, own = sum(local) / len(PEERS), new  # type: ignore[assignment]
    return x_N


@pytest.mark.parametrize("rounds", [1, 2, 7])
def test_the_anchor_is_the_papers_when_all_contribute(rounds: int):
    torch.testing.assert_close(
        trained("scaffold", rounds).peers[0].anchor_N.double(), papers(rounds), rtol=0, atol=2e-5
    )


def test_it_ends_at_the_optimum_of_all_where_plain_averaging_does_not():
    best_N = Quadratics().best_N
    turned, plain = (trained(method, 80).peers[0].anchor_N for method in ("scaffold", "diloco lr=1 momentum=0"))
    assert float((turned - best_N).abs().max()) < 0.02
    assert float((plain - best_N).abs().max()) > 0.1


def test_c_counts_by_all_members_and_x_by_those_who_came():
    came = tuple(Contributor(bytes([n]) * 32) for n in range(2))
    info = RoundInfo(0, came, (1.0, 1.0), members=8)
    received = {"change": torch.full((4,), 3.0), "control": torch.full((4,), 4.0)}
    after, state = Scaffold().outer_step(torch.zeros(4), received, {"control": torch.zeros(4)}, info)
    assert after.tolist() == [-3.0] * 4
    assert state["control"].tolist() == [1.0] * 4


def test_a_record_says_how_many_members_there_are():
    run = Learners(Scaffold(), 3, torch.zeros(NUMEL))
    run.learn({n: randn(n) for n in PEERS})
    run.meet((0, 1))
    control_N = run.peers[0].replica.states[0]["control"]
    torch.testing.assert_close(control_N, -(randn(0) + randn(1)) / 3, rtol=0, atol=1e-6)


def test_what_was_wrong_in_c_once_is_gone_after_a_round_of_all():
    runs = [trained("scaffold", 2) for _ in range(2)]
    state = runs[0].peers[0].replica.states[0]
    for peer in runs[0].peers:
        peer.replica.states[0] = {"control": state["control"] + 100.0}
    after = []
    for run in runs:
        run.learn({n: 0.01 * randn(n) for n in PEERS})
        run.meet(PEERS)
        after.append(run.peers[0].replica.states[0]["control"])
    torch.testing.assert_close(*after, rtol=0, atol=1e-4)


def test_a_round_that_passes_a_peer_by_leaves_its_turn_and_drops_the_gradients_of_before():
    run, task = trained("scaffold", 3), Quadratics()
    own = run.peers[2].schedule.live.own(0)
    turn_N = own["turn"]
    run.learn({n: -RATE * task.gradient(n, run.peers[n].live_N) for n in PEERS})
    assert float(own["steps"]) == 1.0
    run.meet((0, 1))
    assert torch.equal(own["turn"], turn_N)
    assert set(own) == {"turn"}


def test_a_contribution_that_is_refused_changes_nothing_of_a_peers_own():
    run = trained("scaffold", 2)
    run.learn({n: 0.01 * randn(n) for n in PEERS})
    before = dict(run.peers[0].schedule.live.own(0))
    run.offer(PEERS)
    run.peers[0].schedule.timing.withdraw()
    after = run.peers[0].schedule.live.own(0)
    assert set(after) == set(before)
    assert all(torch.equal(after[name], one) for name, one in before.items())


def test_steps_made_while_a_contribution_was_in_flight_count_in_the_next_one():
    run = trained("scaffold", 2)
    run.learn({n: 0.01 * randn(n) for n in PEERS})
    offered = run.offer(PEERS)
    run.learn({n: 0.02 * randn(n + 5) for n in PEERS})
    run.commit(offered)
    own = run.peers[0].schedule.live.own(0)
    assert float(own["steps"]) == 1.0
    torch.testing.assert_close(own["sum"], -0.02 * randn(5), rtol=0, atol=1e-6)


def test_a_newcomer_is_not_turned_before_its_first_round_is_over():
    run = trained("scaffold", 5)
    newcomer = run.begun(2)
    newcomer.load(dict(run.peers[0].replica.shared_tensors()))
    before_N = newcomer.live_N
    newcomer.learn(0.5 * randn(1))
    assert torch.equal(newcomer.live_N, before_N + 0.5 * randn(1))


def test_an_inner_optimizer_without_gradients_is_refused_with_the_terms():
    inner = {"optimizer": "spsa", "weight_decay": 0.0, "clip": None}
    with pytest.raises(
        ConfigError, match=r'inner\.optimizer = "spsa" does not fit outer\.method scaffold: it makes no'
    ):
        check_methods(preset_manifest("scaffold", inner=inner))
