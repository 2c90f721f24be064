"""DES-LOC and MT-DAO: which vectors are sent when, and what the inner optimizer has of their means."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from decentral.manifest import preset_manifest
from decentral.optimizers import NO_MOMENTS, Contributor, RoundInfo
from decentral.optimizers.shared_moments import MTDAO, DESLoc
from decentral.parameters import schema_of
from decentral.replica.apply import slice_state_weights, slice_weights
from decentral.replica.reduction import Reduction
from decentral.replica.replica import Replica
from decentral.training.inner_optimizers import QHADOPT
from decentral.training.live_model import LiveModel
from decentral.training.live_side import LiveSide, Moments
from decentral.wire.messages import FrameRef, ReducePlan
from tests.kit.learners import EXACT, Learners, replica_of
from tests.kit.replicas import NUMEL, SIGNERS
from tests.kit.tables import method_of

MOMENTS = ("exp_avg", "exp_avg_sq")
A, B = (signer.peer for signer in SIGNERS[:2])


def randn(seed: int, numel: int = NUMEL) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def moments_of(run: Learners, name: str) -> Tensor:
    return torch.stack([peer.inner.moments[name] for peer in run.peers])


def change_moments(run: Learners, seed: int) -> None:
    for n, peer in enumerate(run.peers):
        for k, name in enumerate(MOMENTS):
            peer.schedule.live.write_moment(name, 0, randn(100 * seed + 10 * n + k).abs())


@pytest.mark.parametrize(
    ("spelling", "due"),
    [
        ("des_loc first_moment=3 second_moment=6", [0, 0, 1, 0, 0, 2] * 2),
        ("des_loc first_moment=1 second_moment=1", [2] * 4),
        ("mt_dao", [2] * 4),
        ("mt_dao slow=2 variance=4", [0, 1, 0, 2]),
    ],
)
def test_a_moment_is_averaged_in_every_nth_outer_step_of_its_fragment_and_kept_between(spelling: str, due: list[int]):
    run, sent = Learners(method_of(spelling), 2, randn(0)), []
    for number in range(len(due)):
        change_moments(run, number)
        run.learn({n: 0.01 * randn(10 * number + n) for n in range(2)})
        local = torch.stack([peer.live_N for peer in run.peers])
        before = dict(run.peers[0].replica.states[0])
        offered = run.offer((0, 1))
        run.commit(offered)
        sent.append(len(offered.made[0].states))
        torch.testing.assert_close(run.peers[1].anchor_N, local.mean(0), rtol=0, atol=1e-6)
        for channel in run.method.channels()[1:]:
            now = run.peers[1].replica.states[0][channel.name]
            if channel.is_due(number):
                torch.testing.assert_close(now, moments_of(run, channel.name).mean(0))
            else:
                assert torch.equal(now, before[channel.name])
    assert sent == due


@pytest.mark.parametrize("spelling", ["des_loc first_moment=1 second_moment=1", "mt_dao"])
def test_rounding_of_what_was_sent_makes_no_second_moment_negative(spelling: str):
    method, anchor = method_of(spelling), randn(0)
    received = {"change": randn(1), "exp_avg": randn(2), "exp_avg_sq": randn(3)}
    _, state = method.outer_step(anchor, received, method.init(anchor), RoundInfo())
    assert torch.equal(state["exp_avg_sq"], randn(3).clamp_min(0))
    assert torch.equal(state["exp_avg"], randn(2))
    assert torch.equal(received["exp_avg_sq"], randn(3))


def test_of_several_fragments_each_counts_its_own_outer_steps():
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    schema = schema_of(model, 2)
    anchors = [torch.zeros(fragment.numel) for fragment in schema.fragments]
    replica = Replica(schema, anchors, DESLoc(first_moment=2, second_moment=3), EXACT, EXACT)
    due = [[channel.name for channel in replica.due(outer_step)][1:] for outer_step in range(12)]
    assert due[0::2] == due[1::2] == [[], ["exp_avg"], ["exp_avg_sq"], ["exp_avg"], [], ["exp_avg", "exp_avg_sq"]]


class Newcomer:
    """A model under AdamW that has made no step yet."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(7, 5)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.moments = Moments(LiveModel(self.model, 1, None), [self.optimizer])

    @property
    def numel(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def step(self) -> None:
        self.model(torch.ones(2, 7)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def test_a_newcomers_adamw_has_the_shared_means_after_its_first_step():
    method, peer = DESLoc(), Newcomer()
    means = {"exp_avg": randn(1, peer.numel), "exp_avg_sq": randn(2, peer.numel).square()}
    assert not method.adopt(means, peer.moments, 0, MOMENTS)  # no place for them yet
    peer.step()
    assert method.adopt(means, peer.moments, 0, ("change", *MOMENTS))
    for name in MOMENTS:
        assert torch.equal(peer.moments.read_moment(name, 0), means[name])
    by_parameter = [peer.optimizer.state[parameter]["exp_avg"] for parameter in peer.model.parameters()]
    assert torch.equal(torch.cat([one.flatten() for one in by_parameter]), means["exp_avg"])
    before = torch.cat([p.detach().flatten() for p in peer.model.parameters()])
    peer.step()
    after = torch.cat([p.detach().flatten() for p in peer.model.parameters()])
    assert bool(torch.isfinite(after).all())
    assert not torch.equal(before, after)


def test_what_a_commit_did_not_have_and_means_of_nothing_overwrite_no_moment():
    method, peer = DESLoc(), Newcomer()
    peer.step()
    own = {name: peer.moments.read_moment(name, 0) for name in MOMENTS}
    means = {"exp_avg": randn(1, peer.numel), "exp_avg_sq": torch.zeros(peer.numel)}
    assert method.adopt(means, peer.moments, 0, ("change",))
    assert method.adopt(means, peer.moments, 0, ("exp_avg_sq",))  # of zero: nobody has sent any yet
    assert all(torch.equal(peer.moments.read_moment(name, 0), own[name]) for name in MOMENTS)


def test_an_inner_optimizer_without_moments_sends_zeros_and_is_no_hindrance():
    method = DESLoc(first_moment=1, second_moment=1)
    assert method.states_sent(randn(0), NO_MOMENTS, 0) == {}
    sgd = torch.optim.SGD((model := nn.Linear(2, 2)).parameters(), lr=0.1)
    assert Moments(LiveModel(model, 1, None), [sgd]).read_moment("exp_avg", 0) is None


@pytest.mark.parametrize("given", ["some", "none"])
def test_who_has_no_moments_counts_in_no_mean_of_them_and_in_that_of_the_changes(given: str):
    """A newcomer, or an inner optimizer that is no Adam, pulled everybody's moments to zero."""
    run = Learners(DESLoc(first_moment=1, second_moment=1), 3, randn(0))
    for peer in run.peers[1:] if given == "some" else run.peers:
        peer.schedule.set_live(LiveSide(peer.model))
    before = dict(run.peers[0].replica.states[0])
    run.learn({n: randn(10 + n) for n in range(3)})
    local = torch.stack([peer.live_N for peer in run.peers])
    own = dict(run.peers[0].inner.moments) if given == "some" else before
    run.meet((0, 1, 2))
    for peer in run.peers:
        torch.testing.assert_close(peer.anchor_N, local.mean(0), rtol=0, atol=1e-6)
        for name in MOMENTS:
            assert torch.equal(peer.replica.states[0][name], own[name])


def test_the_owner_of_a_part_counts_who_has_moments_as_a_gather_does():
    method, refs = DESLoc(first_moment=1, second_moment=1), []
    sent = {A: [randn(1), randn(2), randn(3).square()], B: [randn(4), torch.zeros(NUMEL), randn(5).square()]}
    for peer in (A, B):
        refs.append(FrameRef(peer, bytes(32), 0, 1, 1, 0, method.says(LiveSide(), 0, sent[peer])))
    plan = ReducePlan(0, 1, 0, 0, tuple(refs), ((A, 0, NUMEL),))
    replica = replica_of(method, randn(0))
    weights = slice_weights(replica, refs, 0)
    slices = {peer: torch.cat(vectors) for peer, vectors in sent.items()}
    made = Reduction(plan, 0, slices).result(EXACT, weights, beside=slice_state_weights(replica, refs, 0, weights))
    change_N, first_N, second_N = EXACT.decompress(made.payloads).view(3, -1)
    assert torch.equal(change_N, (sent[A][0] + sent[B][0]) / 2)
    assert torch.equal(first_N, sent[A][1])
    assert torch.equal(second_N, (sent[A][2] + sent[B][2]) / 2)


def test_a_summary_that_no_peer_of_ours_makes_counts_in_no_mean():
    told = [Contributor(A, summary=summary) for summary in (b"", b"\0", b"\x03", b"\xff" * 64)]
    assert list(DESLoc().state_weights(0, told, [1.0] * 4, {})) == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("make", [torch.optim.Adamax, torch.optim.SGD, torch.optim.AdamW])
def test_means_are_adopted_all_or_none(make: type[torch.optim.Optimizer]) -> None:
    """Adamax has a first moment only: it was put back to the last mean after every inner step until the next one."""
    model = torch.nn.Linear(3, 2)
    optimizer = make(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    live, means = Moments(LiveModel(model, 1, None), [optimizer]), {name: torch.full((8,), 5.0) for name in MOMENTS}
    before = live.read_moment("exp_avg", 0)
    is_adam = make is torch.optim.AdamW
    assert DESLoc().adopt(means, live, 0, MOMENTS) == is_adam
    after = live.read_moment("exp_avg", 0)
    if before is not None and after is not None:
        assert torch.equal(after, means["exp_avg"] if is_adam else before)


# ---- mt_dao ----
#
# MT-DAO: parameters, slow momentum and second moment are means at their periods; QH-ADOPT goes on from them.

CURVATURE = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
RATE, SHARE, B1, B2, H = 0.02, 0.7, 0.9, 0.99, 4


class Local:
    """A peer in float64: QH-ADOPT on a quadratic about a goal of its own."""

    def __init__(self, goal: float) -> None:
        self.goal = goal
        self.model = nn.Linear(3, 1, bias=False).double()
        self.optimizer = QHADOPT(self.model.parameters(), lr=RATE, betas=(B1, B2), mixing=SHARE)
        nn.init.ones_(self.model.weight)

    @property
    def x(self) -> Tensor:
        return self.model.weight.detach().flatten()

    def train(self) -> None:
        for _ in range(H):
            self.model.weight.grad = (CURVATURE * (self.x - self.goal)).reshape(1, 3)
            self.optimizer.step()

    def moment(self, name: str) -> Tensor:
        held: Tensor = self.optimizer.state[self.model.weight][name].flatten()
        return held


def written_out(goals: list[float], rounds: int) -> tuple[Tensor, Tensor, Tensor]:
    """The paper's loop over all peers at once: H local steps, then means of x, u and v."""
    goal_P1 = torch.tensor(goals, dtype=torch.float64)[:, None]
    x = torch.ones(len(goals), 3, dtype=torch.float64)
    u, v, t = torch.zeros_like(x), (CURVATURE * (x - goal_P1)).square(), 0
    for _ in range(rounds):
        for _ in range(H):
            gradient = CURVATURE * (x - goal_P1)
            if t:
                normal = (gradient / v.sqrt().clamp(min=1e-6)).clamp(-(t**0.25), t**0.25)
                u = B1 * u + (1 - B1) * normal
                x = x - RATE * ((1 - SHARE) * normal + SHARE * u)
                v = B2 * v + (1 - B2) * gradient.square()
            t += 1
        x, u, v = (one.mean(0).expand_as(one) for one in (x, u, v))
    return x[0], u[0], v[0]


def test_two_peers_on_quadratics_are_the_papers_loop_in_float64():
    peers, method = [Local(-1.0), Local(3.0)], MTDAO()
    anchor = torch.ones(3, dtype=torch.float64)
    state = method.init(anchor)
    for _ in range(6):
        for peer in peers:
            peer.train()
        received = {name: torch.stack([peer.moment(name) for peer in peers]).mean(0) for name in MOMENTS}
        received["change"] = torch.stack([method.contribute(anchor, peer.x) for peer in peers]).mean(0)
        anchor, state = method.outer_step(anchor, received, state, RoundInfo())
        for peer in peers:
            with torch.no_grad():
                peer.model.weight.copy_(method.merge(peer.x, peer.x, anchor).reshape(1, 3))
                for name in MOMENTS:
                    peer.optimizer.state[peer.model.weight][name].copy_(state[name].reshape(1, 3))
    for ours, wanted in zip((anchor, state["exp_avg"], state["exp_avg_sq"]), written_out([-1.0, 3.0], 6), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-11, atol=1e-11)


def test_who_has_no_moments_yet_counts_in_no_mean_of_them_and_in_that_of_the_changes():
    run = Learners(MTDAO(), 3, randn(0))
    for n, peer in enumerate(run.peers):
        for k, name in enumerate(MOMENTS):
            peer.inner.write_moment(name, 0, torch.zeros(NUMEL) if n == 2 else randn(10 * n + k).abs())
    run.learn({n: 0.01 * randn(n) for n in range(3)})
    local = torch.stack([peer.live_N for peer in run.peers])
    had = {name: torch.stack([peer.inner.moments[name] for peer in run.peers[:2]]) for name in MOMENTS}
    run.meet((0, 1, 2))
    torch.testing.assert_close(run.peers[2].anchor_N, local.mean(0), rtol=0, atol=1e-6)
    for name in MOMENTS:
        torch.testing.assert_close(run.peers[2].replica.states[0][name], had[name].mean(0))


def test_a_newcomer_has_the_swarms_momentum_after_its_first_gradient_which_moves_nothing():
    torch.manual_seed(0)
    model = nn.Linear(7, 5)
    optimizer = QHADOPT(model.parameters(), lr=1e-3)
    live, method = Moments(LiveModel(model, 1, None), [optimizer]), MTDAO()
    generator = torch.Generator().manual_seed(1)
    means = {name: torch.rand(40, generator=generator) for name in MOMENTS}
    assert not method.adopt(means, live, 0, MOMENTS), "there is no place for them yet"
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    model(torch.ones(2, 7)).square().sum().backward()
    optimizer.step()
    assert torch.equal(torch.cat([p.detach().flatten() for p in model.parameters()]), before)
    assert method.adopt(means, live, 0, MOMENTS)
    for name in MOMENTS:
        assert torch.equal(live.read_moment(name, 0), means[name])


def test_the_preset_trains_by_qh_adopt_32_steps_a_round():
    inner = preset_manifest("mt_dao").inner
    assert (inner.optimizer_name, inner.steps, inner.own()) == (
        "qh_adopt", 32, {"beta1": 0.99, "beta2": 0.9999, "mixing": 0.7},
    )  # fmt: skip
