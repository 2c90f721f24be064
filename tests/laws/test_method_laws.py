"""What every outer method promises of a run: peers agree, come, go and come back, and a bad one spoils nothing."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from decentral.errors import NonFiniteError
from decentral.optimizers import OuterMethod, RoundInfo
from decentral.parameters import schema_of
from decentral.replica.apply import outer_step, round_info
from decentral.replica.contribution import encode_whole
from decentral.replica.replica import Replica
from decentral.state.snapshot import outer_name
from tests.kit.learners import EXACT, Learners, codec_of, held, replica_of
from tests.kit.replicas import NUMEL
from tests.kit.tables import ALONG_DIRECTIONS, NEUTRAL, NOT_LINEAR, PRESETS, method_of, topology_of

pytestmark = pytest.mark.one_of_each
ALL = (0, 1, 2)
neutral = pytest.mark.methods(lambda spelling: spelling in NEUTRAL.values())
with_consensus = pytest.mark.methods(lambda spelling: topology_of(spelling) == "all")


def sent_by(spelling: str) -> list[str]:
    return [channel.name for channel in method_of(spelling).channels()]


with_moments = pytest.mark.methods(lambda spelling: "exp_avg_sq" in sent_by(spelling))
in_pairs = pytest.mark.methods(lambda spelling: topology_of(spelling) == "pair")
linear = pytest.mark.methods(lambda spelling: spelling not in NOT_LINEAR)


def randn(seed: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def whole(seed: int) -> Tensor:
    """Whole numbers: sums and halves of them are exact."""
    return torch.randint(-500, 501, (NUMEL,), generator=torch.Generator().manual_seed(seed)).float()


def trained(run: Learners, rounds: int, present: Sequence[int], seed: int = 0) -> Learners:
    for number in range(rounds):
        run.learn({n: 0.01 * randn(100 * seed + 10 * number + n) for n in present})
        run.meet(present)
    return run


def alike(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return set(first) == set(second) and all(torch.equal(first[name], second[name]) for name in first)


def all_finite(run: Learners) -> bool:
    return all(bool(torch.isfinite(one).all()) for peer in run.peers for one in held(peer).values())


@with_consensus
def test_peers_hold_the_same_bits_whoever_contributed(outer: OuterMethod):
    run = Learners(outer, 3, randn(0), codec_of(outer))
    for number, present in enumerate([ALL, (0, 1), (2,), (1, 2), ALL, ALL, (0, 2), ALL]):
        trained(run, 1, present, number)
        first, *others = (dict(peer.replica.shared_tensors()) for peer in run.peers)
        assert all(alike(first, other) for other in others)
        assert len({peer.replica.digest for peer in run.peers}) == 1
    assert not torch.equal(run.peers[0].anchor_N, randn(0))


@linear
@in_pairs
def test_the_mean_of_all_replicas_does_not_depend_on_who_met_whom(outer: OuterMethod):
    """Exact codecs: each peer's momentum enters once, and the pulls of a pair cancel."""
    means = []
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        run = Learners(outer, 3, randn(0))
        for number in range(5):
            run.learn({n: 0.01 * randn(10 * number + n) for n in ALL})
            run.meet(order)
        means.append(torch.stack([peer.anchor_N.double() for peer in run.peers]).mean(0))
    for mean_N in means[1:]:
        torch.testing.assert_close(mean_N, means[0], rtol=0, atol=1e-5)


@with_consensus
def test_a_peer_that_resumes_between_its_contribution_and_the_commit_goes_on_with_the_same_bits(outer: OuterMethod):
    run = trained(Learners(outer, 3, randn(0), codec_of(outer)), 4, ALL)
    run.learn({n: 0.01 * randn(n) for n in ALL})
    offered = run.offer(ALL)
    resumed = replica_of(outer, torch.zeros(NUMEL), run.codec)
    resumed.load(load(save(held(run.peers[0]))))
    made = offered.made[0]
    again = encode_whole(resumed, 0, made.gradient_N, made.states)
    assert bytes(again.body) == bytes(made.encoded.body)
    resumed.install(outer_step(resumed, offered.record, offered.frames))
    resumed.feedback[0] = again.feedback
    run.commit(offered)
    assert alike(dict(resumed.shared_tensors()) | dict(resumed.own_tensors()), held(run.peers[0]))
    assert resumed.digest == run.peers[0].replica.digest


@in_pairs
def test_a_peer_of_a_pair_that_resumes_before_the_swap_goes_on_with_the_same_bits(outer: OuterMethod):
    run, other = (trained(Learners(outer, 3, randn(0), codec_of(outer)), 4, ALL) for _ in range(2))
    restarted = other.begun(0)
    restarted.load(load(save(held(other.peers[0]))))
    other.peers[0] = restarted
    for one in (run, other):
        trained(one, 3, ALL, seed=1)
    assert all(alike(held(a), held(b)) for a, b in zip(run.peers, other.peers, strict=True))


def test_a_newcomer_that_took_what_a_donor_holds_goes_on_bit_for_bit_like_it(outer: OuterMethod):
    run = trained(Learners(outer, 2, randn(0), codec_of(outer)), 5, (0, 1))
    newcomer = run.begun(2)
    newcomer.load(load(save(dict(run.peers[0].replica.shared_tensors()))))
    assert newcomer.replica.digest == run.peers[0].replica.digest
    run.peers.append(newcomer)
    if outer.topology == "pair":  # each has its own: alone with the same steps they stay alike
        _check_alone_alike(run)
    else:
        trained(run, 4, ALL, seed=1)
    first, *_, last = (dict(peer.replica.shared_tensors()) for peer in run.peers)
    assert alike(first, last)


def _check_alone_alike(run: Learners) -> None:
    run.peers[0].replica.feedback[0] = {}  # which no snapshot has
    run.peers = [run.peers[0], run.peers[2]]
    for number in range(4):
        run.learn({n: 0.01 * randn(number) for n in (0, 1)})
        run.meet((0,))
        run.head = dataclasses.replace(run.head, outer_step=run.head.outer_step - 1)
        run.meet((1,))


@neutral
def test_a_sole_contributor_without_momentum_at_rate_1_ends_where_it_trained_to(outer: OuterMethod):
    run = Learners(outer, 1, whole(0))
    run.learn({0: whole(1)})
    run.meet((0,))
    assert torch.equal(run.peers[0].anchor_N, whole(0) + whole(1))
    assert torch.equal(run.peers[0].live_N, whole(0) + whole(1))


@neutral
def test_one_inner_sgd_step_of_each_is_data_parallel_sgd(outer: OuterMethod):
    present = (0, 1) if outer.topology == "pair" else ALL
    run, rate = Learners(outer, len(present), randn(0)), 0.1
    wanted_N = randn(0)
    for number in range(4):
        gradients = [randn(10 * number + n) for n in present]
        run.learn({n: -rate * gradients[n] for n in present})
        run.meet(present)
        wanted_N = wanted_N - rate * torch.stack(gradients).mean(0)
        for peer in run.peers:
            torch.testing.assert_close(peer.anchor_N, wanted_N, rtol=0, atol=1e-5)


def test_who_is_absent_is_not_counted(outer: OuterMethod):
    """Two of three give the anchor of a run that has two."""
    three, two = (trained(Learners(outer, peers, randn(0)), 4, (0, 1)) for peers in (3, 2))
    assert all(alike(held(a), held(b)) for a, b in zip(three.peers, two.peers, strict=False))


@neutral
def test_what_an_absent_peer_learnt_counts_in_full_when_it_comes(outer: OuterMethod):
    run = Learners(outer, 3, whole(0))
    run.learn({n: whole(n + 1) for n in ALL})
    run.meet((0, 1))
    absent = run.peers[2]
    assert torch.equal(absent.live_N - absent.anchor_N, whole(3))
    before_N = absent.anchor_N
    run.meet((2,))
    assert torch.equal(absent.anchor_N, before_N + whole(3))


SUMMARIES = {
    "infinity": struct.pack("<d", float("inf")),
    "less than nothing": struct.pack("<d", -1.0),
    "too long": b"\xff" * 64,
}
OTHER_SUMMARIES = {
    "nothing": b"",
    "nan": struct.pack("<d", float("nan")),
    "minus infinity": struct.pack("<d", -float("inf")),
    "zero": struct.pack("<d", 0.0),
    "the largest": struct.pack("<d", 1.7976931348623157e308),
    "one byte": b"\x7f",
}


@with_consensus
@pytest.mark.parametrize(
    "said",
    [
        *(pytest.param(said, id=name) for name, said in SUMMARIES.items()),
        *(pytest.param(said, id=name, marks=pytest.mark.long) for name, said in OTHER_SUMMARIES.items()),
    ],
)
def test_whatever_a_peer_says_of_itself_the_anchor_stays_finite_and_alike(outer: OuterMethod, said: bytes):
    run = trained(Learners(outer, 3, randn(0)), 2, ALL)
    for number in range(3):
        run.learn({n: 0.01 * randn(10 * number + n) for n in ALL})
        run.meet(ALL, {2: said})
        assert all_finite(run)
        assert len({peer.replica.digest for peer in run.peers}) == 1
    before_N = run.peers[0].anchor_N
    trained(run, 2, (0, 1), seed=1)  # and it has not stopped the others
    assert all_finite(run)
    assert not torch.equal(run.peers[0].anchor_N, before_N)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_peer_whose_weights_are_not_finite_changes_nobody(outer: OuterMethod, bad: float):
    run = trained(Learners(outer, 3, randn(0)), 2, ALL)
    run.learn({0: 0.01 * randn(1), 1: 0.01 * randn(2), 2: torch.full((NUMEL,), bad)})
    before = [held(peer) for peer in run.peers]
    with pytest.raises(NonFiniteError):
        run.meet(ALL)
    assert all(alike(held(peer), kept) for peer, kept in zip(run.peers, before, strict=True))
    run.meet((0, 1))
    assert all_finite(run)


@with_moments
def test_moments_that_are_not_finite_are_not_sent(outer: OuterMethod):
    run = Learners(outer, 3, randn(0))
    moment = outer.channels()[1]
    run.peers[2].inner.moments[moment.name][5] = torch.nan
    trained(run, moment.every - 1, ALL)  # not due before
    run.learn({n: 0.01 * randn(n) for n in ALL})
    before = [held(peer) for peer in run.peers]
    with pytest.raises(NonFiniteError):
        run.meet(ALL)
    assert all(alike(held(peer), kept) for peer, kept in zip(run.peers, before, strict=True))


@with_consensus
def test_where_nobody_counts_nothing_moves(outer: OuterMethod):
    deaf = type(
        "Deaf", (type(outer),), {"__slots__": (), "weights": lambda self, told, given, state: [0.0] * len(told)}
    )
    run = Learners(outer, 3, randn(0), codec_of(outer))
    trained(run, 3, ALL)
    before = dict(run.peers[0].replica.shared_tensors())
    for peer in run.peers:
        peer.replica.method = deaf(**dataclasses.asdict(outer))
    run.learn({n: 0.01 * randn(n) for n in ALL})
    counted = outer.nobody_counts(run.peers[0].replica.states[0], RoundInfo())
    run.meet(ALL)
    expected = before | {outer_name(0, name): tensor for name, tensor in counted.items()}
    assert alike(dict(run.peers[0].replica.shared_tensors()), expected)


def test_every_method_of_ours_has_a_neutral_spelling():
    assert set(NEUTRAL) == set(PRESETS) - set(ALONG_DIRECTIONS)
    assert all(spelling.split()[0] == name for name, spelling in NEUTRAL.items())


def test_a_method_is_told_the_outer_step_of_its_fragment_counted_from_0():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    schema = schema_of(model, 2)
    anchors = [torch.zeros(fragment.numel) for fragment in schema.fragments]
    replica = Replica(schema, anchors, method_of("diloco"), EXACT, EXACT)
    record = Learners(method_of("diloco"), 1, randn(0)).offer((0,)).record
    records = [dataclasses.replace(record, outer_step=n, fragment=n % 2) for n in range(6)]
    assert [round_info(replica, one, [1.0]).step for one in records] == [0, 0, 1, 1, 2, 2]
