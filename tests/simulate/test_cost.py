"""Arithmetic over sizes: the same as the encoders', and linear where the library says so."""

from __future__ import annotations

import warnings

import pytest

from decentral.consensus.chain import VOTING
from decentral.simulate import cost
from decentral.swarm.dht import looks_in
from decentral.swarm.directory import circles
from decentral.training import round_cost
from decentral.transport.requests import PREFIX_NBYTES
from decentral.wire.keys import Signer
from decentral.wire.messages import (
    MAX_PEERS,
    Certificate,
    Commit,
    FrameRef,
    Lease,
    Offer,
    Proposal,
    Record,
    ReducePlan,
    encode,
    seal_lease,
)
from tests.kit.machines import Swarm, finish_round

HASH = bytes(32)


def peers(n):
    return tuple(number.to_bytes(32, "big") for number in range(n))


def refs(n, *, numbered=False):
    return tuple(FrameRef(peer, HASH, number if numbered else 0, 1, 1) for number, peer in enumerate(peers(n)))


def ranges(n):
    return tuple((peer, number, number + 1) for number, peer in enumerate(peers(n)))


def gather_record(n):
    return Record(HASH, 3, 9, 5, 0, 0, HASH, HASH, peers(n), refs(n), (), (), peers(n), False)


def reduce_record(n, parts):
    frames = refs(parts, numbered=True)
    return Record(HASH, 3, 9, 5, 0, 2, HASH, HASH, peers(n), frames, refs(n), ranges(parts), peers(n), False)


@pytest.fixture(scope="module")
def lease():
    signer = Signer(bytes(32))
    address = "/ip4/203.0.113.77/tcp/31330/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
    return seal_lease(Lease(HASH, signer.peer, 7, 15, (address,), 1, 2, HASH, 1, 0, "0.1.0"), signer)


@pytest.mark.parametrize("n", [1, 2, 7, 100, MAX_PEERS])
def test_sizes_are_those_of_the_encoders(n):
    record, parts = gather_record(n), min(n, 40)
    reduced = reduce_record(n, parts)
    votes = tuple((peer, bytes(64)) for peer in peers(n // 2 + 1))
    assert round_cost.proposal_nbytes(round_cost.record_nbytes(n, n)) == len(encode(Proposal(0, record, bytes(64))))
    assert round_cost.proposal_nbytes(round_cost.record_nbytes(n, parts, n)) == len(
        encode(Proposal(0, reduced, bytes(64)))
    )
    assert round_cost.commit_nbytes(round_cost.record_nbytes(n, n), n // 2 + 1) == len(
        encode(Commit(record, Certificate(0, votes)))
    )
    assert round_cost.plan_nbytes(n, parts) == len(encode(ReducePlan(1, 2, 0, 0, refs(n), ranges(parts))))


@pytest.mark.parametrize("n", [5, 21, 22, 30])
def test_what_is_said_of_a_gather_is_what_its_machines_say(n):
    """Up to 21 vote and are told by the leader; beyond, a committee votes, and passes on what it has decided."""
    swarm, said = Swarm(n), []
    swarm.lose = lambda sender, to, message: not isinstance(message, tuple) and bool(said.append((sender, message)))
    assert finish_round(swarm, 1)
    swarm.run(lambda: not swarm.queue)
    found, leader = round_cost.control("gather", n, 10**6), VOTING.leaders(swarm.genesis())[0]
    assert sum(PREFIX_NBYTES + len(encode(message)) for _, message in said) == pytest.approx(n * found.nbytes, rel=0.02)
    assert len(said) == pytest.approx(n * found.messages, rel=0.02), "a vote is not given once the commit is there"
    led = [message for sender, message in said if sender == leader and not isinstance(message, Offer)]
    assert len(led) == pytest.approx(cost.leader("gather", n, 10**6).messages, abs=1)


def test_a_pair_costs_the_same_in_a_swarm_of_any_even_size():
    costs = {round_cost.pair(n, 10**6, lambda values: 2.0 * values) for n in (2, 100, 10_000)}
    assert len(costs) == 1
    assert costs.pop().messages == 2.0


def test_the_frames_of_a_gather_grow_with_the_swarm_and_those_of_a_reduce_do_not():
    numel = 1 << 30

    def body(values):
        return float(values)

    assert round_cost.gather(1001, numel, body).nbytes == pytest.approx(1000 * numel, rel=1e-6)
    assert round_cost.reduce(1001, numel, body).nbytes == pytest.approx(2 * numel * 1000 / 1001, rel=1e-3)


def test_groups_bound_a_gather():
    costs = {cost.in_groups(n, 10**6, lambda values: 0.02 * values, 32) for n in (32, 1024, 10_000)}
    assert len(costs) == 1


def test_a_search_asks_one_more_node_per_doubling(lease):
    assert cost.nodes_asked(10) == 9
    assert cost.nodes_asked(500) == 20
    assert cost.nodes_asked(10_000) == pytest.approx(23.3, abs=0.1)
    small, large = cost.lookups(100, lease), cost.lookups(10_000, lease)
    assert large.messages < 1.2 * small.messages
    assert large.nbytes < 1.2 * small.nbytes, "who looks shares the bytes of a look-up with all others"


def test_about_four_peers_look_for_all_per_renewal_whatever_the_size_of_the_swarm():
    for n in (3, 7):
        assert all(looks_in(turn, peer, n - 1) for peer in peers(n) for turn in range(5))
    ids = [Signer(number.to_bytes(32, "big")).peer for number in range(1000)]
    counts = [sum(looks_in(turn, peer, 999) for peer in ids) for turn in range(50)]
    assert 3 <= sum(counts) / len(counts) <= 5
    assert max(counts) <= 15


def test_the_bytes_of_the_dht_are_those_of_hiveminds_protobuf(lease):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its dependencies, at the first import
        from hivemind.dht.storage import DictionaryDHTValue
        from hivemind.proto import dht_pb2
        from hivemind.utils import MSGPackSerializer
    beam = cost.BEAM
    node, info, value = bytes(20), dht_pb2.NodeInfo(node_id=b"n" * 20), encode(lease)
    nearest = dht_pb2.FindResult(nearest_node_ids=[node] * beam, nearest_peer_ids=[bytes(38)] * beam)
    store = dht_pb2.StoreRequest(
        keys=[node],
        subkeys=[MSGPackSerializer.dumps("x" * 52)],
        values=[MSGPackSerializer.dumps(value)],
        expiration_time=[1.8e9],
        in_cache=[False],
        peer=info,
    )
    leases = DictionaryDHTValue()
    for number in range(100):
        leases.store(f"{number:052d}", MSGPackSerializer.dumps(value), 1.8e9 + number)
    assert len(dht_pb2.FindRequest(keys=[node], peer=info).SerializeToString()) == cost.FIND_NBYTES
    assert len(dht_pb2.FindResponse(results=[nearest], peer=info).SerializeToString()) == cost.FOUND_NBYTES
    assert len(store.SerializeToString()) - len(value) == cost.STORE_NBYTES
    assert len(dht_pb2.StoreResponse(store_ok=[True], peer=info).SerializeToString()) == cost.STORED_NBYTES
    per_lease = len(MSGPackSerializer.dumps(leases)) / 100 - len(value)
    assert per_lease == pytest.approx(cost.LEASE_IN_DHT_NBYTES, abs=1.0)


@pytest.mark.parametrize("n", [1, 2, 21, 22, 30, 64, 100, 257])
def test_whom_a_peer_tells_on_average_is_whom_the_directory_tells(n):
    peers = [number.to_bytes(4, "big") for number in range(n)]
    told = [circles(peer, [other for other in peers if other != peer]) for peer in peers]
    leases = sum(len(one.passed_to) * (1 + len(one.row)) for one in told)
    sums = (sum(len(one.told) for one in told), sum(len(one.passed_to) for one in told), leases)
    assert cost.around(n) == pytest.approx([total / n for total in sums])
