"""Methods of pairs: where partners meet, what the pull keeps, when replicas stay together, and when they meet at all.

How both of a pair move but for the pull is held in tests/laws/test_equations.py, through compression, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from decentral.optimizers import OuterMethod
from decentral.optimizers.gasloc import GASLoC
from decentral.optimizers.noloco import NoLoCo
from decentral.optimizers.pair_averaging import ADPSGD, A2CiD2, LateMerge, most_twin_pull
from decentral.optimizers.steps import nesterov
from tests.kit.tables import method_of
from tests.optimizers.gossiping import Replicas, gaussian, growth, matching, unchecked

# ---- one swap, by hand ----


@pytest.mark.parametrize(
    ("spelling", "state", "wanted", "wanted_state"),
    [
        ("noloco alpha=0 gamma=1", {}, [3.0, 3.0], {}),
        ("noloco alpha=0.5 gamma=0.5", {"momentum": [0.4, 0.0]}, [3.7, 2.5], {"momentum": [-0.3, 0.5]}),
        ("gasloc momentum=0 lr=1 pull=1", {}, [3.0, 3.0], {}),
        ("gasloc momentum=0 lr=1 pull=0.5", {}, [3.5, 2.5], {}),
        ("gasloc momentum=0 lr=1 pull=0", {}, [4.0, 2.0], {}),
        ("ad_psgd", {}, [3.0, 3.0], {}),
        ("late_merge", {}, [3.0, 3.0], {}),
        # They meet at the mean of the mixed, and the twin is pulled more.
        ("a2cid2 chi1=4 chi2=1", {}, [3.0, 3.0], {"twin": [4.0 - 2 * 1.0, 2.0 + 2 * 1.0]}),
    ],
)
def test_partners_at_4_and_2_that_learnt_nothing_end_here(
    spelling: str, state: dict[str, list[float]], wanted: list[float], wanted_state: dict[str, list[float]]
):
    swarm = Replicas(method_of(spelling), torch.tensor([[4.0], [2.0]]).double())
    swarm.state |= {name: torch.tensor(values).double()[:, None] for name, values in state.items()}
    swarm.meet(torch.zeros(2, 1).double(), [[0, 1]])
    assert swarm.x_PN.flatten().tolist() == pytest.approx(wanted)
    for name, values in wanted_state.items():
        assert swarm.state[name].flatten().tolist() == pytest.approx(values)


def test_training_that_moves_down_moves_nolocos_slow_weights_down():
    """The sign in the paper's equation 2 would climb."""
    swarm, outer = Replicas(NoLoCo(), torch.ones(2, 1).double()), NoLoCo()
    change = outer.contribute(torch.ones(1), torch.zeros(1)).double().expand(2, 1)
    swarm.meet(change, [[0, 1]])
    assert swarm.x_PN.flatten().tolist() == pytest.approx([0.3, 0.3])


def test_gaslocs_momentum_is_of_where_each_would_go_alone_and_neither_of_where_it_was_nor_of_where_it_was_pulled():
    swarm = Replicas(GASLoC(lr=1.0, momentum=0.5, pull=1.0), torch.tensor([[4.0], [0.0]]).double())
    swarm.meet(torch.tensor([[1.0], [0.0]]).double(), [[0, 1]])  # p is 3 and 0, their mean 1.5
    assert swarm.x_PN.flatten().tolist() == [1.5 + 0.5 * (3.0 - 4.0), 1.5]
    swarm.meet(torch.zeros(2, 1).double(), [[0], [1]])  # p is 1 and 1.5
    assert swarm.x_PN.flatten().tolist() == [1.0 + 0.5 * (1.0 - 3.0), 1.5 + 0.5 * (1.5 - 0.0)]


def test_both_of_a_pair_end_at_the_mean_of_where_they_would_go_alone():
    x, change = gaussian(2, 30), gaussian(2, 30, seed=1)
    swarm = Replicas(ADPSGD(lr=0.5), x)
    swarm.meet(change, [[0, 1]])
    torch.testing.assert_close(swarm.x_PN, (x - 0.5 * change).mean(0).expand(2, 30), rtol=0, atol=1e-12)


# ---- what is the same as what ----


@pytest.mark.parametrize("method", [NoLoCo(alpha=0.5, beta=0.7, gamma=0.7), GASLoC()], ids=lambda method: method.name)
def test_one_group_of_all_with_equal_replicas_is_the_step_of_its_mean_change(method: OuterMethod):
    """SGD with a heavy ball of NoLoCo, Nesterov's of GASLoC: replicas that are equal do not feel the pull."""
    start = gaussian(30)
    swarm, anchor, buffer = Replicas(method, start.expand(5, 30)), start.clone(), torch.zeros(30).double()
    for number in range(10):
        change = gaussian(30, seed=number)
        if isinstance(method, NoLoCo):
            swarm.meet(-change.expand(5, 30), [list(range(5))])
            buffer = 0.5 * buffer + 0.7 * change
            anchor = anchor - buffer
        else:
            swarm.meet(change.expand(5, 30), [list(range(5))])
            anchor, buffer = nesterov(anchor, change, buffer, 0.7, 0.5)
    assert swarm.disagreement < 1e-12
    torch.testing.assert_close(swarm.x_PN[3], anchor, rtol=0, atol=1e-6)


@pytest.mark.parametrize("other", [A2CiD2(chi1=0.5, chi2=0.5), A2CiD2(chi1=4.0, chi2=4.0), LateMerge(first=1.0)])
def test_without_what_it_adds_a_method_is_ad_psgd_bit_for_bit(other: OuterMethod):
    random = torch.Generator().manual_seed(0)
    first, second = Replicas(other, gaussian(5, 20)), Replicas(ADPSGD(), gaussian(5, 20))
    for number in range(10):
        change, groups = gaussian(5, 20, seed=number), matching(5, random)
        first.meet(change, groups)
        second.meet(change, groups)
    assert torch.equal(first.x_PN, second.x_PN)
    assert torch.equal(first.state.get("twin", first.x_PN), first.x_PN)


def test_push_sum_over_pairs_keeps_every_weight_at_1_and_is_ad_psgd():
    """Each sends half of its w*y and of its w to its partner, and keeps the other half; z = sum / w."""
    random, x = torch.Generator().manual_seed(0), gaussian(6, 20)
    swarm, weighted, weight = Replicas(ADPSGD(), x), x.clone(), torch.ones(6, 1).double()
    for number in range(10):
        change, groups = gaussian(6, 20, seed=number), matching(6, random)
        swarm.meet(change, groups)
        weighted = weighted - change  # the step goes on the numerator
        for pair in groups:
            weighted[pair] = weighted[pair].sum(0) / 2
            weight[pair] = weight[pair].sum(0) / 2
    assert weight.flatten().tolist() == [1.0] * 6
    torch.testing.assert_close(weighted / weight, swarm.x_PN, rtol=0, atol=1e-12)


# ---- a2cid2's twin ----


def test_a_round_alone_is_the_flow_of_the_equations_and_the_change_goes_on_both():
    x, y, change = (gaussian(1, 30, seed=seed) for seed in range(3))
    swarm = Replicas(A2CiD2(lr=0.5, chi1=9.0, chi2=1.0), x)
    swarm.state = {"twin": y}
    swarm.meet(change, [[0]])
    rate = 1 / (2 * math.sqrt(9.0))
    flow = torch.linalg.matrix_exp(torch.tensor([[-rate, rate], [rate, -rate]], dtype=torch.float64))
    wanted = flow @ (torch.cat([x, y]) - 0.5 * change)
    torch.testing.assert_close(torch.cat([swarm.x_PN, swarm.state["twin"]]), wanted, rtol=0, atol=1e-11)


@pytest.mark.parametrize("sent", [lambda t: t, lambda t: t.half().double()], ids=["exact", "fp16"])
def test_the_total_of_replicas_and_twins_moves_by_the_changes_alone(sent: Callable[[torch.Tensor], torch.Tensor]):
    """The mixing and, through lossy compression, too, the pulls of a pair take nothing and add nothing."""
    random, swarm = torch.Generator().manual_seed(0), Replicas(A2CiD2(), gaussian(7, 30))
    wanted = (swarm.x_PN + swarm.state["twin"]).sum(0)
    for number in range(30):
        change = gaussian(7, 30, seed=number)
        swarm.meet(change, matching(7, random), sent)
        wanted = wanted - 2 * change.sum(0)
    torch.testing.assert_close((swarm.x_PN + swarm.state["twin"]).sum(0), wanted, rtol=0, atol=1e-10)


# ---- when replicas stay together ----


def by_momentum(method: OuterMethod, momentum: str, pull: str) -> Callable[[float, float], OuterMethod]:
    """Of a momentum and a share of the bound that its text has: 2 * (1 - momentum**2)."""
    return lambda value, share: unchecked(method, **{momentum: value, pull: share * 2 * (1 - value**2)})


def by_rate(rate: float, share: float) -> OuterMethod:
    """A2CiD2 that mixes so much in a round, at that share of the strongest pull of its twin."""
    root, pull = 1 / (2 * rate), share * most_twin_pull((1 - math.exp(-2 * rate)) / 2)
    return unchecked(A2CiD2(), chi1=pull * root, chi2=root / pull)


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (by_momentum(NoLoCo(), "alpha", "gamma"), (0.0, 0.3, 0.5, 0.9)),
        (by_momentum(GASLoC(), "momentum", "pull"), (0.0, 0.3, 0.5, 0.9)),
        (by_rate, (0.05, 0.125, 0.5, 1.0, 3.0)),
    ],
    ids=["noloco", "gasloc", "a2cid2"],
)
def test_the_bound_is_exact_for_an_odd_number_of_replicas_and_safe_for_an_even_one(
    make: Callable[[float, float], OuterMethod], values: tuple[float, ...]
):
    for value in values:
        for peers in (2, 3, 4, 5, 8, 17, 64, 1001):
            within = make(value, 0.999)
            type(within).__post_init__(within)  # it is taken
            assert growth(within, peers) < 1
            if peers % 2:
                assert growth(make(value, 1.001), peers) > 1


@pytest.mark.parametrize(("peers", "most"), [(2, 3.0), (4, 1.8), (8, 1.6154), (64, 1.512)])
def test_few_replicas_in_even_number_bear_a_stronger_pull_than_the_bound(peers: int, most: float):
    sides = [unchecked(NoLoCo(), alpha=0.5, gamma=share * most) for share in (0.999, 1.001)]
    assert growth(sides[0], peers) < 1 < growth(sides[1], peers)


@pytest.mark.parametrize(("peers", "wanted"), [(2, 0.0), (3, 0.5), (4, 1 / 3), (17, 0.5), (64, 31 / 63)])
def test_the_square_of_ad_psgds_disagreement_halves_a_round_or_better(peers: int, wanted: float):
    """By hand: (peers - 2) / (2 * (peers - 1)) of an even number, 1/2 of an odd one."""
    assert growth(ADPSGD(), peers) == pytest.approx(wanted, abs=1e-12)


def test_the_growth_is_that_of_simulated_pairs():
    """The mean square of many coordinates follows the expectation; pairs are drawn for some of them at a time."""
    random, method = torch.Generator().manual_seed(0), NoLoCo(gamma=1.2)
    start = gaussian(4, 12_000)
    parts = [Replicas(method, part) for part in (start - start.mean(0)).split(400, dim=1)]
    sizes = []
    for _ in range(30):
        for part in parts:
            part.meet(torch.zeros_like(part.x_PN), matching(4, random))
        sizes.append(sum(part.disagreement**2 for part in parts))
    assert (sizes[-1] / sizes[9]) ** (1 / 20) == pytest.approx(growth(method, 4), rel=0.1)


@pytest.mark.parametrize(
    "spelling",
    [
        "noloco",
        "noloco alpha=0 gamma=1",
        "noloco alpha=0.5 gamma=0.2",
        "noloco alpha=0.8 gamma=0.3",
        "gasloc",
        "gasloc momentum=0.5 pull=1.3",
        "gasloc momentum=0.9 pull=0.2",
        "a2cid2",
    ],
)
def test_without_training_the_disagreement_contracts_and_the_mean_stays(spelling: str):
    random, swarm = torch.Generator().manual_seed(0), Replicas(method_of(spelling), gaussian(16, 40))
    began, mean = swarm.disagreement, swarm.mean
    for _ in range(400):
        if swarm.disagreement < 1e-3 * began:
            break
        swarm.meet(torch.zeros(16, 40).double(), matching(16, random))
    assert swarm.disagreement < 1e-3 * began
    torch.testing.assert_close(swarm.mean, mean, rtol=0, atol=1e-12)


def test_peers_that_each_pull_towards_a_goal_of_their_own_end_near_the_mean_and_agree_better_with_a_twin():
    apart, goal = {}, gaussian(8, 20)
    for method in (A2CiD2(), ADPSGD(), GASLoC()):
        random, swarm = torch.Generator().manual_seed(0), Replicas(method, 0 * goal)
        for _ in range(150):
            swarm.meet(0.3 * (swarm.x_PN - goal), matching(8, random))
        torch.testing.assert_close(swarm.mean, goal.mean(0), rtol=0, atol=1e-6)
        apart[method.name] = swarm.disagreement
    assert apart["a2cid2"] < 0.7 * apart["ad_psgd"]
    assert apart["gasloc"] < float((goal - goal.mean(0)).norm())


# ---- when pairs meet ----


def meetings(method: LateMerge, steps: int) -> list[int]:
    return [number for number in range(steps) if method.meets(number)]


@pytest.mark.parametrize(("first", "growth"), [(0.1, 100), (0.0, 10), (0.5, 40), (0.3, 1)])
def test_as_many_meet_as_the_shares_of_all_steps_add_up_to(first: float, growth: int):
    method, share, came = LateMerge(first=first, growth=growth), 0.0, 0
    for number in range(3 * growth):
        share += first + (1 - first) * min(1.0, number / growth)
        came += method.meets(number)
        assert abs(came - share) <= 1


def test_meetings_come_more_and_more_often_and_in_the_end_at_each_step():
    at = meetings(LateMerge(first=0.1, growth=100), 300)
    quarters = [sum(start <= number < start + 25 for number in at) for start in (0, 25, 50, 75)]
    assert quarters == sorted(quarters)
    assert quarters[0] <= 6
    assert [number for number in at if number >= 100] == list(range(100, 300))
    assert LateMerge().meets(10**9)
    assert meetings(LateMerge(first=1.0), 50) == list(range(50))
