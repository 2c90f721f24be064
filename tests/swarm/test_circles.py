"""Whom a peer tells that it is here."""

from __future__ import annotations

import math

import pytest

from decentral.swarm.directory import DIRECT, circles


def swarm(count):
    peers = [number.to_bytes(4, "big") for number in range(count)]
    return {peer: circles(peer, [other for other in peers if other != peer]) for peer in peers}


@pytest.mark.parametrize("count", [1, 2, 3, DIRECT, DIRECT + 1])
def test_in_a_small_swarm_everybody_is_told(count):
    for peer, around in swarm(count).items():
        assert set(around.told) == set(swarm(count)) - {peer}
        assert not around.passed_to


@pytest.mark.parametrize("count", [*range(DIRECT + 2, 60), 64, 100, 255, 256, 257, 1024])
def test_everybody_hears_of_everybody_from_itself_or_from_one_other(count):
    peers = swarm(count)
    heard = {peer: {peer} for peer in peers}
    for peer, around in peers.items():
        for other in around.told:
            heard[other].add(peer)
        for other in around.passed_to:
            heard[other] |= {peer, *around.row}
    assert all(known == set(peers) for known in heard.values())


@pytest.mark.parametrize("count", [22, 64, 100, 256, 1024])
def test_few_are_told_and_none_twice(count):
    for peer, around in swarm(count).items():
        told = [*around.told, *around.passed_to]
        assert len(set(told)) == len(told) <= 3 * math.sqrt(count)
        assert peer not in told
        assert set(around.row) <= set(around.told), "what is passed on was heard from itself"
