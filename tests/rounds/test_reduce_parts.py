"""The parts of a reduce: in which order they are sent, and what is remembered of their results."""

from __future__ import annotations

import pytest
import torch

from decentral.replica.reduction import Results
from decentral.rounds.reduce import Grain, in_order, partition, parts_of
from decentral.wire.frames import FrameKind, Header, seal
from decentral.wire.keys import Signer
from decentral.wire.messages import FrameRef, ReducePlan

SIGNERS = sorted((Signer(bytes([n] * 32)) for n in range(4)), key=lambda signer: signer.peer)
PEERS = tuple(signer.peer for signer in SIGNERS)
CONTRIBUTORS = tuple(FrameRef(peer, bytes(32), 0, 1, 1) for peer in PEERS)


@pytest.fixture
def plan():
    return ReducePlan(0, 1, 0, 0, CONTRIBUTORS, partition(96, PEERS, [2.0, 1.0, 1.0, 1.0], Grain(align=4, piece=12)))


def test_everybodys_first_part_goes_before_anybodys_second_and_the_own_one_last(plan):
    assert [len(parts_of(plan, peer)) for peer in PEERS] == [3, 1, 1, 1]
    order = in_order(plan, PEERS[1])
    assert sorted(order) == list(range(6))
    owners = [PEERS.index(plan.partition[part][0]) for part in order]
    assert owners == [2, 3, 0, 1, 0, 0]


def result(sender, part, plan=0, round_=1, body=b"1"):
    header = Header(FrameKind.RESULT, bytes(32), 0, round_, 0, part, 4, plan, bytes(32), SIGNERS[sender].peer, 0, 0)
    return seal(header, body, SIGNERS[sender])


def test_results_are_found_by_their_frames_until_the_round_is_over():
    results, first, second = Results(), result(0, 0), result(1, 1)
    results.add(first, torch.zeros(1))
    results.add(second, torch.ones(1))
    assert results.by_frame() == {first.hash: torch.zeros(1), second.hash: torch.ones(1)}
    results.forget()
    assert results.by_frame() == {}


def test_an_owner_that_sends_several_results_of_one_part_fills_no_memory():
    results = Results()
    for n in range(10):
        results.add(result(0, 0, body=bytes([n])), torch.full((1,), float(n)))
    assert list(results.by_frame().values()) == [torch.zeros(1)]


def test_a_newer_plan_takes_the_place_of_an_older_one_and_not_the_other_way_round():
    results = Results()
    results.add(result(0, 0, plan=1), torch.ones(1))
    results.add(result(1, 1, plan=0), torch.zeros(1))
    assert list(results.by_frame().values()) == [torch.ones(1)]
    results.add(result(1, 1, plan=2), torch.zeros(1))
    assert list(results.by_frame().values()) == [torch.zeros(1)]
    results.add(result(1, 1, round_=2), torch.ones(1))
    assert list(results.by_frame().values()) == [torch.ones(1)]
