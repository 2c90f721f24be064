"""Nothing that a run accepts loses progress without a word: in every round, of every method, whatever compresses it and
whatever carries it, what was applied and what is owed afterwards is what was given and owed before.
"""

import pytest
import torch
from torch import Tensor

from decentral.compressors import Compressor, parse_compressor
from decentral.errors import ConfigError
from decentral.manifest import Manifest, check_methods, preset_manifest
from decentral.replica.contribution import Contribution
from decentral.replica.pair_step import encode_half, install, step_alone, step_together
from decentral.rounds.partners import matching
from tests.kit.replicas import NUMEL, SIGNERS, Swarm, changed_books, mean, peer_of

pytestmark = pytest.mark.one_of_each
# What a sender owes is only known under feedback: "none" says that what is dropped is gone.
FEEDBACK = ["ef(beta=0.95)", "dgc(momentum=0.5)"]
ALL = (0, 1, 2)
METHODS = ("diloco", "streaming", "sparseloco")  # what is sent does not depend on them; of all: test_mass
EQUAL = ((0, 0, 320), (1, 320, 640), (2, 640, NUMEL))  # the plan of a reduce: owner, start, stop
MOVED = ((0, 0, 100), (0, 100, 700), (2, 700, NUMEL))
TURNED = ((1, 0, 333), (2, 333, NUMEL))
# Who contributes in each round, and the plans of its reduce, of which the last one is committed.
ROUNDS = [
    (ALL, [EQUAL]),
    (ALL, [EQUAL]),
    (ALL, [MOVED]),
    ((0, 2), [MOVED, TURNED]),  # made again; an owner that contributes nothing
    ((1, 2), [EQUAL]),
    (ALL, [TURNED, EQUAL]),
    (ALL, [((2, 0, NUMEL),)]),
]


def terms(method: str, compressor: Compressor, feedback: str, exchange: str) -> Manifest:
    return preset_manifest(
        method,
        compressor={"chain": str(compressor), "feedback": feedback},
        exchange={"kind": exchange},
        outer={"alpha": 0.0, "beta": 1.0, "gamma": 0.5}
        if exchange == "pair"
        else {"learning_rate": 0.5, "norm_clip": None},  # which takes mass, and is meant to
    )


def accepted(manifest: Manifest) -> bool:
    try:
        check_methods(manifest)
    except ConfigError:
        return False
    return True


def fits(spelling: str, exchange: str) -> bool:
    """Whether a run takes a compressor with an exchange: a reduce cuts tensors anywhere, a pair sends states."""
    method = "noloco" if exchange == "pair" else METHODS[0]
    return accepted(terms(method, parse_compressor(spelling), FEEDBACK[0], exchange))


def gradient(seed: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def check_equal(found: Tensor, wanted: Tensor, size: float, where: object) -> None:
    lost = float((found.double() - wanted.double()).abs().max())
    assert lost <= 1e-6 * size, f"{lost:.3g} of {size:.3g} was lost or made, {where}"


@pytest.mark.parametrize("exchange", ["gather", "reduce"])
def test_what_fits_an_exchange_depends_neither_on_the_method_nor_on_the_feedback(compressor: Compressor, exchange: str):
    for feedback in FEEDBACK:
        taken = [accepted(terms(method, compressor, feedback, exchange)) for method in METHODS]
        assert taken == [fits(str(compressor), exchange)] * len(METHODS), feedback


@pytest.mark.methods(lambda spelling: fits(spelling, "gather"))
@pytest.mark.parametrize("feedback", [*FEEDBACK, "econtrol(eta=0.01)"])
def test_a_commit_of_a_gather_delivers_what_was_given_or_leaves_it_owed(compressor: Compressor, feedback: str):
    check_conserved(compressor, feedback, "gather")


@pytest.mark.methods(lambda spelling: fits(spelling, "reduce"))
@pytest.mark.parametrize("feedback", FEEDBACK)
def test_a_commit_of_a_reduce_delivers_what_was_given_or_leaves_it_owed(compressor: Compressor, feedback: str):
    check_conserved(compressor, feedback, "reduce")


def check_conserved(compressor: Compressor, feedback: str, exchange: str) -> None:
    manifests = [terms(method, compressor, feedback, exchange) for method in METHODS]
    swarm = Swarm([peer_of(manifest, torch.zeros(NUMEL)) for manifest in manifests])
    mechanism = swarm.peers[0].codec.feedback
    for number, (contributors, cuts) in enumerate(ROUNDS if exchange == "reduce" else ROUNDS[:4]):
        given = {n: gradient(10 * number + n) + 0.5 for n in contributors}
        books, owed_N = swarm.books(), swarm.owed()
        applied_N = swarm.gather(given) if exchange == "gather" else swarm.reduce(given, *cuts)
        after = swarm.books()
        sent = [changed_books(mechanism, given[n], books[n], after[n]) for n in contributors]
        size = max(float(one.abs().max()) for one in [*sent, *(peer[name] for peer in after for name in peer)])
        check_equal(applied_N + swarm.owed(), owed_N + mean(sent), size, f"round {number}")


@pytest.mark.methods(lambda spelling: fits(spelling, "pair"))
@pytest.mark.parametrize("feedback", FEEDBACK)
def test_a_pair_applies_what_both_gave_or_both_owe_it(compressor: Compressor, feedback: str):
    _gossip(terms("noloco", compressor, feedback, "pair"))


def _gossip(manifest: Manifest) -> None:
    peers = [peer_of(manifest, gradient(n)) for n in range(3)]
    for step in range(10):
        for group in matching(b"run", step, [signer.peer for signer in SIGNERS[:3]]):
            pair = [next(n for n in range(3) if SIGNERS[n].peer == peer) for peer in group]
            _take(manifest, [peers[n] for n in pair], [0.1 * gradient(10 * step + n) for n in pair])


def _take(manifest, replicas, changes) -> None:
    """One step of a pair, or of who is left over; without momentum and at beta = 1 the sum moves by what is applied."""
    mechanism, before = replicas[0].codec.feedback, [dict(replica.feedback[0]) for replica in replicas]
    made = [
        Contribution(0, b"", change_N, change_N, 1, 1, states=(replica.anchors[0],))
        for replica, change_N in zip(replicas, changes, strict=True)
    ]
    halves = [encode_half(replica, mine) for replica, mine in zip(replicas, made, strict=True)]
    if len(replicas) == 1:
        steps = [step_alone(replicas[0], 0, made[0])]
    else:
        steps = [
            step_together(replica, 0, mine, mine_CN, theirs_CN)
            for replica, mine, mine_CN, theirs_CN in zip(replicas, made, halves, reversed(halves), strict=True)
        ]
    moved = sum(step.after_N.double() - step.before_N.double() for step in steps)
    given = [
        changed_books(mechanism, change_N, old, step.feedback)
        for change_N, old, step in zip(changes, before, steps, strict=True)
    ]
    check_equal(moved, sum(given), max(float(step.after_N.abs().max()) for step in steps), len(replicas))
    for replica, step in zip(replicas, steps, strict=True):
        install(replica, step)


def test_contributions_whose_sum_is_beyond_float32_move_the_anchor_alike_however_they_are_exchanged():
    """Their mean is within it; an owner of such a part would else have nothing to send, and others would be applied."""
    given = {n: gradient(n) for n in ALL}
    for gradient_N in given.values():
        gradient_N[:5] = 3e38
    gathered, reduced = (
        Swarm([peer_of(terms("diloco", parse_compressor("none"), "none", kind), torch.zeros(NUMEL)) for _ in ALL])
        for kind in ("gather", "reduce")
    )
    means = [gathered.gather(given), reduced.reduce(given, EQUAL)]
    assert torch.equal(*means)
    assert bool(torch.isfinite(means[0]).all())
    torch.testing.assert_close(means[0][:5], torch.full((5,), 3e38))
    assert gathered.peers[0].digest == reduced.peers[0].digest
