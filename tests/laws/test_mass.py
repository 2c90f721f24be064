"""What peers learnt is in the anchor or still owed: of every method, with its preset's terms and with debts.

In three steps, and nothing can be lost but in one of them. What a peer learnt it contributed, or gave up with a word,
or has still. The mean of what was contributed, by the method's own weights, is what the method was handed, but for what
is owed from then on, or what a compressor that nobody owes for may lose. And the anchor moved by the method's equation
of all that it was handed: with momentum, a rate or an adaptive step that is no conservation, and the law is the
equation itself, once more in float64 and apart from the method. A method that has none of these keeps the whole.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from decentral.consensus.chain import contributions
from decentral.errors import ConfigError
from decentral.manifest import Manifest, check_methods, preset_manifest
from decentral.optimizers import OuterMethod
from decentral.optimizers.steps import Carried
from decentral.simulate.equations import EQUATIONS, PULLS, Averaged
from decentral.tensors.memory import Lazy
from tests.kit.learners import SCHEMA
from tests.kit.replicas import NUMEL, Cut, changed_books
from tests.kit.tables import ALONG_DIRECTIONS, NEUTRAL, PRESETS, topology_of
from tests.laws.bounds import BOUNDS, name_of
from tests.laws.course import Course, Round

# Shape suffixes: N = elements of the one fragment; K = contributors; float64.

pytestmark = pytest.mark.one_of_each
ALL = (0, 1, 2)
SPARSE = {"chain": "topk(k=64, chunk=4096)", "feedback": "ef(beta=1.0)"}
EXACT = {"chain": "none", "feedback": "none"}
EQUAL = ((0, 0, 320), (1, 320, 640), (2, 640, NUMEL))
TURNED = ((1, 0, 333), (2, 333, NUMEL))
ROUNDS: list[tuple[Sequence[int], Cut]] = [(ALL, EQUAL), (ALL, TURNED), ((0, 2), EQUAL), (ALL, EQUAL), (ALL, TURNED)]
BY_TENSOR = ("heloco", "decoupled", *ALONG_DIRECTIONS)  # they go by directions of tensors; their equations are of one
IN_DEBT = ("masha",)  # which values move is decided by float32's last bits: what all owe has a law, and no equation
ROUNDED = 1e-5  # of the largest value: what float32 leaves of some steps

with_consensus = pytest.mark.methods(lambda spelling: topology_of(spelling) == "all")
with_an_equation = pytest.mark.methods(lambda spelling: spelling.split()[0] in EQUATIONS)
neutral = pytest.mark.methods(lambda spelling: spelling in NEUTRAL.values() and topology_of(spelling) == "all")


@cache
def terms(name: str, compressor: str = "own") -> Manifest | None:
    """A method's preset, or the same with another compressor; None where a run does not take that."""
    tables = {"sparse": {"compressor": SPARSE}, "exact": {"compressor": EXACT}}.get(compressor, {})
    manifest = preset_manifest(name if name in PRESETS else "sparseloco", outer={"norm_clip": None}, **tables)
    try:
        check_methods(manifest)
    except ConfigError:
        return None
    return manifest


@cache
def courses(outer: OuterMethod) -> list[tuple[Course, list[Round]]]:
    """Of a method all that it can be run with here; a norm clip takes mass, and is meant to."""
    taken = [manifest for manifest in (terms(outer.name), terms(outer.name, "sparse")) if manifest is not None]
    rounds = [(ALL, EQUAL)] * 4 if outer.name in ALONG_DIRECTIONS else ROUNDS  # walks of two steps may be dropped
    return [trained(Course(manifest, outer), rounds) for manifest in taken]


def trained(course: Course, rounds: Sequence[tuple[Sequence[int], Cut]]) -> tuple[Course, list[Round]]:
    done = []
    for number, (present, cut) in enumerate(rounds):
        random = torch.Generator().manual_seed(number)
        steps = [0.01 * torch.randn(NUMEL, generator=random) + 0.005 for _ in ALL]
        done.append(course.round(steps, present, cut))
        assert not done[-1].met.steps[0].unmoved
    return course, done


def check_equal(found_N: Tensor, wanted_N: Tensor, size: float, most: Tensor | float = 0.0) -> None:
    """``size``: the largest value that was added; ``most``: what may be lost beside rounding."""
    lost_N = (found_N.double() - wanted_N.double()).abs() - most
    assert float(lost_N.max()) <= ROUNDED * size, f"{float(lost_N.max()):.3g} of {size:.3g} was lost or made"


@with_consensus
def test_what_a_peer_learnt_it_contributed_or_gave_up_or_has_still(outer: OuterMethod):
    for course, _ in courses(outer):
        for peer, account in zip(course.peers, course.accounts, strict=True):
            left_N = peer.anchor_N.double() - peer.live_N.double()
            told_N = account.given_N + account.dropped_N + left_N
            check_equal(account.learnt_N + account.again_N, told_N, float(told_N.abs().max()))
            carries = isinstance(outer.merge(Lazy(torch.ones(1).clone), torch.ones(1), torch.ones(1)), Carried)
            assert not carries or float(account.again_N.abs().max()) < ROUNDED
    assert courses(outer)


@with_consensus
def test_what_was_contributed_a_method_is_handed_but_for_what_is_owed(outer: OuterMethod):
    """By its own weights, as its record names them; where it is handed rows, each by itself."""
    for course, rounds in courses(outer):
        for one in rounds:
            rows_KN, most_KN = sent(course, one)
            apart = one.met.mean_N.dim() == 2
            shares = torch.tensor(one.met.info.weights, dtype=torch.float64)[:, None]
            wanted_N = rows_KN if apart else (shares * rows_KN).sum(0) / shares.sum()
            most_N = most_KN if apart else (shares * most_KN).sum(0) / shares.sum()
            if course.reduces and not course.codec.feedback.sender:  # what a result loses is owed by nobody, too
                most_N = most_N + lost_at_most(course, wanted_N.abs() + most_N, one)
            size = max(
                float(rows_KN.abs().max()), *(float(owed.abs().max()) for owed in (one.owed_before_N, one.owed_after_N))
            )
            check_equal(one.met.mean_N.double() + one.owed_after_N, wanted_N + one.owed_before_N, size, most_N)


def sent(course: Course, one: Round) -> tuple[Tensor, Tensor]:
    """What each contributor sent (K, N), as its books have it, and what of it may be lost."""
    feedback = course.codec.feedback
    given = [made.gradient_N for made in one.made.values()]
    if not feedback.sender:
        return torch.stack(given).double(), torch.stack([lost_at_most(course, given_N, one) for given_N in given])
    books = [(one.before[n], one.after[n]) for n in one.made]
    rows = [changed_books(feedback, given_N, *both) for given_N, both in zip(given, books, strict=True)]
    return torch.stack(rows), torch.zeros(len(rows), NUMEL, dtype=torch.float64)


def lost_at_most(course: Course, value_N: Tensor, one: Round) -> Tensor:
    """Of each value, as the compressor's bound says: a gather has whole tensors, a reduce the ranges of its plan."""
    if course.method.summary.rebuilds:  # from what was said, and nothing was compressed
        return torch.zeros_like(value_N, dtype=torch.float64)
    compressor = course.codec.compressor
    bound = BOUNDS[name_of(str(compressor))].per_value
    assert bound is not None
    ranges = [stop - start for _, start, stop in one.met.record.partition]
    pieces = torch.split(value_N.double(), ranges or [math.prod(shape) for shape in SCHEMA.fragments[0].shapes])
    return torch.cat([bound(compressor, piece) for piece in pieces])


@with_an_equation
def test_an_anchor_moved_by_the_equation_of_all_that_its_method_was_handed(outer: OuterMethod):
    for course, rounds in courses(outer):
        told = [averaged(one) for one in rounds]
        moved_N = torch.cat([moved_by(outer, [in_place(one, *place) for one in told]) for place in places_of(outer)])
        check_equal(course.anchor_N, moved_N, float(moved_N.abs().max()))
        assert float(moved_N.abs().max()) > 0


def moved_by(outer: OuterMethod, run: Sequence[Averaged]) -> Tensor:
    return EQUATIONS[outer.name](run, dataclasses.asdict(outer))  # type: ignore[call-overload]  # a dataclass


def places_of(outer: OuterMethod) -> list[tuple[slice, str]]:
    if outer.name not in BY_TENSOR:
        return [(slice(0, NUMEL), "")]
    matrix, vector = SCHEMA.fragments[0].parameters
    return [(slice(0, matrix.numel), matrix.name), (slice(matrix.numel, NUMEL), vector.name)]


@pytest.mark.methods(lambda spelling: spelling.split()[0] in IN_DEBT)
def test_an_anchor_moved_by_all_that_its_method_was_handed_but_for_what_all_owe(outer: OuterMethod):
    for course, rounds in courses(outer):
        handed_N = torch.stack([one.met.mean_N.double() for one in rounds]).sum(0)
        owed_N = rounds[-1].met.steps[0].state["debt"].double()
        check_equal(owed_N - course.anchor_N, handed_N, float(handed_N.abs().max()))


def averaged(one: Round) -> Averaged:
    """What a method was handed, and told of it: where that is a mean, as if each had sent it."""
    handed, refs = one.met.mean_N.double(), contributions(one.met.record)
    rows_KN = handed if handed.dim() == 2 else handed.expand(len(refs), -1)
    return Averaged(rows_KN.mean(0), refs, rows_KN, [told.age for told in one.met.info.contributors])


def in_place(one: Averaged, place: slice, name: str) -> Averaged:
    return dataclasses.replace(one, mean_N=one.mean_N[place], rows_KN=one.rows_KN[:, place], name=name)


@neutral
def test_without_momentum_at_rate_1_the_anchor_and_the_debts_have_all_that_was_learnt(outer: OuterMethod):
    """With debts where a run takes them, and else without a loss. All are there: one number divides all."""
    manifest = terms(outer.name, "sparse") or terms(outer.name, "exact")
    assert manifest is not None
    course, rounds = trained(Course(manifest, outer), [(ALL, EQUAL), (ALL, TURNED), (ALL, EQUAL)])
    given_N = torch.stack([account.given_N for account in course.accounts]).mean(0)
    debts = [one.get("debt", torch.zeros(NUMEL)).double() for one in rounds[-1].after]
    kept_N = -course.anchor_N + torch.stack(debts).mean(0) + rounds[-1].owed_after_N
    check_equal(kept_N, given_N, float(given_N.abs().max()))


def test_every_method_of_ours_has_an_equation():
    assert set(PRESETS) == set(EQUATIONS) | set(PULLS) | set(IN_DEBT)
    assert not set(EQUATIONS) & set(PULLS)
