"""Who is named for an update that is too large, and which two for the same one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from decentral.observe.contributions import TOLD_AGAIN, TWIN_ROUNDS, Scrutiny
from decentral.replica.measures import Measure
from decentral.wire.keys import peer_name
from decentral.wire.messages import FrameRef, Record

PEERS = tuple(bytes([n]) * 32 for n in range(1, 5))
NAMES = [peer_name(peer) for peer in PEERS]


def record(round_: int, steps: Sequence[int]) -> Record:
    refs = tuple(FrameRef(peer, peer, 0, count, 1) for peer, count in zip(PEERS, steps, strict=False))
    zero = bytes(32)
    return Record(zero, 0, round_, 0, 0, 0, zero, zero, PEERS, refs, (), (), PEERS, False)


def looked_at(scrutiny: Scrutiny, round_: int, updates: Sequence[torch.Tensor], steps: Sequence[int] = (30,) * 4):
    measures = {peer: Measure.of((update,), update.numel()) for peer, update in zip(PEERS, updates, strict=False)}
    return scrutiny.events(record(round_, steps[: len(updates)]), measures)


def updates(*lengths: float, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [length * torch.randn(4000, generator=generator) for length in lengths]


def twins(cosine: float, seed: int) -> list[torch.Tensor]:
    first, second, noise = updates(1.0, 1.0, 1.0, seed=seed)
    return [first, second, cosine * second + math.sqrt(1 - cosine**2) * noise]


def test_a_peer_far_above_the_median_is_named_with_how_far():
    ((event, fields),) = looked_at(Scrutiny(), 7, updates(1.0, 1.1, 50.0, 0.9))
    assert (event, fields["round"], fields["peer"]) == ("outlier", 7, NAMES[2])
    assert fields["times"] == pytest.approx(50.0, rel=0.1)
    assert fields["norm"] == pytest.approx(fields["times"] * fields["median"])


@pytest.mark.parametrize(
    "lengths",
    [(1.0, 1e6), (1.0, 1.0, 1.01, 1.6), (1.0, 2.0, 4.0, 7.9), (1.0, 1.0, 1e-6, 1.0), (0.0, 0.0, 0.0, 1.0)],
    ids=["two cannot say who is right", "equal ones", "all differ", "one that does nothing", "most do nothing"],
)
def test_nobody_is_named_where_peers_merely_differ(lengths):
    assert looked_at(Scrutiny(), 1, updates(*lengths)) == []


@pytest.mark.parametrize("steps", [(180, 20, 20), (20, 2, 2)], ids=["it trained on", "the others were pressed"])
def test_who_trained_on_while_a_member_died_is_not_named_for_the_length_of_all_that(steps):
    """One of four was killed, and the survivors were told that the update of one is 8.82 times as large."""
    scrutiny = Scrutiny()
    assert looked_at(scrutiny, 1, updates(8.82, 1.0, 1.0), steps) == []
    assert looked_at(scrutiny, 2, updates(1.0, 1.0, 1.0), (20, 20, 20)) == []


def test_who_claims_so_many_steps_round_after_round_is_named_all_the_same():
    scrutiny = Scrutiny()
    told = [looked_at(scrutiny, round_, updates(1.0, 1.0, 9.0, 1.0), (30, 30, 999, 30)) for round_ in range(1, 6)]
    assert [len(events) for events in told] == [0, 1, 0, 0, 0]
    assert looked_at(Scrutiny(), 1, updates(1.0, 1.0, 9.0, 1.0), (30, 30, 121, 30)) != []


def test_steps_that_are_claimed_excuse_no_length_of_a_wrong_rate_and_not_every_so_many_rounds():
    wrong = looked_at(Scrutiny(), 1, updates(1.0, 1.0, 70.0, 1.0), (30, 30, 10**6, 30))
    assert [fields["peer"] for _, fields in wrong] == [NAMES[2]]
    scrutiny, rounds = Scrutiny(), range(1, 20 * TOLD_AGAIN, TOLD_AGAIN)
    told = [looked_at(scrutiny, round_, updates(1.0, 1.0, 30.0, 1.0), (30, 30, 999, 30)) for round_ in rounds]
    assert sum(map(bool, told)) >= 15


def test_who_brings_the_steps_of_several_rounds_is_allowed_their_length():
    assert looked_at(Scrutiny(), 1, updates(1.0, 1.0, 5.0, 1.0), steps=(30, 30, 90, 30)) == []
    assert looked_at(Scrutiny(), 1, updates(1.0, 1.0, 5.0, 1.0), steps=(30, 30, 31, 30)) != []


def test_the_same_peer_is_told_once_in_so_many_rounds():
    scrutiny = Scrutiny()
    told = [n for n in range(1, 2 * TOLD_AGAIN) if looked_at(scrutiny, n, updates(1.0, 1.0, 50.0, 1.0, seed=n))]
    assert told == [1, 1 + TOLD_AGAIN]


def test_two_peers_that_send_the_same_are_named_after_three_rounds_running():
    scrutiny = Scrutiny()
    found = [looked_at(scrutiny, n, twins(0.999, seed=n)) for n in range(1, TWIN_ROUNDS + 1)]
    assert found[:-1] == [[], []]
    ((event, fields),) = found[-1]
    assert (event, fields["round"], fields["peers"]) == ("twins", 3, NAMES[1:3])
    assert fields["cosine"] == pytest.approx(0.999, abs=1e-3)


def test_a_round_in_which_they_differ_begins_the_count_anew_and_one_without_both_does_not():
    scrutiny = Scrutiny()
    for round_, cosine in enumerate((0.999, 0.999, 0.2, 0.999, 0.999), 1):
        assert looked_at(scrutiny, round_, twins(cosine, seed=round_)) == []
    assert looked_at(scrutiny, 6, updates(1.0, 1.0)) == []
    assert looked_at(scrutiny, 7, twins(0.999, seed=7)) != []


def test_rounds_with_an_outlier_are_no_evidence_of_twins_as_all_pull_back_the_same_way():
    scrutiny, events = Scrutiny(), []
    for round_ in range(1, 10):
        *pair, noise = twins(0.99, seed=round_)[1:] + updates(1.0, seed=round_)
        events += looked_at(scrutiny, round_, [*pair, *pair[:1], 100 * noise])
    assert {event for event, _ in events} == {"outlier"}
    for round_ in (10, 11):
        assert looked_at(scrutiny, round_, twins(0.999, seed=round_)) == []
    looked_at(scrutiny, 12, updates(1.0, 1.0, 100.0))
    for round_ in (13, 14):
        assert looked_at(scrutiny, round_, twins(0.999, seed=round_)) == []


def pulled(*own: float, common: float, seed: int) -> list[torch.Tensor]:
    """Updates of which all have much in common, as under an outer step that went too far."""
    (shared,) = updates(common, seed=1000 + seed)
    return [shared + one for one in updates(*own, seed=seed)]


def test_honest_peers_that_are_all_pulled_back_the_same_way_are_no_twins():
    scrutiny = Scrutiny()
    for round_ in range(1, 20):
        three = pulled(1.0, 1.0, 1.0, common=6.0, seed=round_)
        assert float(torch.cosine_similarity(three[0], three[1], dim=0)) > 0.95
        assert looked_at(scrutiny, round_, three) == []


def test_a_copy_with_a_little_noise_is_named_among_peers_that_are_all_pulled_the_same_way():
    scrutiny, found = Scrutiny(), []
    for round_ in range(1, 7):
        first, second, third = pulled(1.0, 1.0, 1.0, common=6.0, seed=round_)
        (noise,) = updates(0.01 * float(second.norm()) / 4000**0.5, seed=2000 + round_)
        found += looked_at(scrutiny, round_, [first, second, second + noise, third])
    assert [fields["peers"] for event, fields in found if event == "twins"] == [NAMES[1:3]]


def test_two_that_are_alone_are_twins_only_where_next_to_nothing_differs():
    honest, copies = Scrutiny(), Scrutiny()
    for round_ in range(1, 10):
        pair = pulled(1.0, 1.0, common=6.0, seed=round_)
        assert looked_at(honest, round_, pair) == []
        (noise,) = updates(0.01 * float(pair[0].norm()) / 4000**0.5, seed=2000 + round_)
        named = looked_at(copies, round_, [pair[0], pair[0] + noise])
        assert bool(named) is (round_ == TWIN_ROUNDS)


def test_peers_as_alike_as_honest_ones_get_are_no_twins():
    scrutiny = Scrutiny()
    assert [looked_at(scrutiny, n, twins(0.8, seed=n)) for n in range(1, 30)] == [[]] * 29
