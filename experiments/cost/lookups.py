"""How many nodes hivemind's Kademlia asks for one look-up among N, and the bytes of its messages.

    python experiments/cost/lookups.py

Its own routing tables and its own traversal; every node has heard of every other, or of 64 at random besides its 20
nearest, in random order. Tables of the nodes that are asked are built when they are asked.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import statistics
import warnings

BEAM, DEPTH_MODULO = 20, 5  # hivemind's defaults for bucket_size and depth_modulo
LOOKUPS = 5


async def asked(n: int, heard: int, seed: int) -> int:
    from hivemind.dht.routing import DHTID, RoutingTable
    from hivemind.dht.traverse import simple_traverse_dht

    chance = random.Random(seed)
    nodes = [DHTID(chance.getrandbits(160)) for _ in range(n)]
    me, key, tables = nodes[0], DHTID(chance.getrandbits(160)), {}

    def nearest(node: DHTID) -> list[DHTID]:
        if node not in tables:
            table = tables[node] = RoutingTable(node, BEAM, DEPTH_MODULO)
            known = nodes if heard >= n else chance.sample(nodes, heard) + near(node)
            for other in chance.sample(known, len(known)):
                if other != node:
                    table.add_or_update_node(other, other)
        return [found for found, _ in tables[node].get_nearest_neighbors(key, BEAM, exclude=me)]

    def near(node: DHTID) -> list[DHTID]:
        return heapq.nsmallest(BEAM + 1, nodes, key=node.xor_distance)

    count = 0

    async def ask(node: DHTID) -> tuple[list[DHTID], bool]:
        nonlocal count
        count += 1
        return nearest(node), False

    await simple_traverse_dht(key, nearest(me), BEAM, ask, visited_nodes=[me])
    return count


def sizes() -> None:
    from hivemind.dht.protocol import DHTProtocol
    from hivemind.dht.routing import DHTID
    from hivemind.dht.storage import DictionaryDHTValue
    from hivemind.proto import dht_pb2
    from hivemind.utils import MSGPackSerializer

    node, peer = bytes(20), bytes(38)
    info = dht_pb2.NodeInfo(node_id=DHTID.generate().to_bytes())
    print("find request", len(dht_pb2.FindRequest(keys=[node], peer=info).SerializeToString()))
    result = dht_pb2.FindResult(nearest_node_ids=[node] * BEAM, nearest_peer_ids=[peer] * BEAM)
    print("find response", len(dht_pb2.FindResponse(results=[result], peer=info).SerializeToString()))
    value, counts = bytes(300), []
    for n in (100, 200):
        leases = DictionaryDHTValue()
        for i in range(n):
            leases.store(f"{i:052d}", MSGPackSerializer.dumps(value), 1.8e9 + i)
        counts.append(len(MSGPackSerializer.dumps(leases)))
    print("one more lease in a response", (counts[1] - counts[0]) / 100 - len(value), "bytes beside it")
    store = dht_pb2.StoreRequest(
        keys=[node],
        subkeys=[MSGPackSerializer.dumps("x" * 52)],
        values=[MSGPackSerializer.dumps(value)],
        expiration_time=[1.8e9],
        in_cache=[False],
        peer=info,
    )
    print("store request", len(store.SerializeToString()) - len(value), "bytes beside the lease")
    print("store response", len(dht_pb2.StoreResponse(store_ok=[True], peer=info).SerializeToString()))
    print("ping", len(dht_pb2.PingRequest(peer=info, validate=True).SerializeToString()))
    answer = dht_pb2.PingResponse(peer=info, dht_time=1.8e9, available=True)
    print("ping answer", len(answer.SerializeToString()), DHTProtocol.__name__)


def main() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sizes()
        for n in (5, 10, 20, 30, 100, 300, 1000, 3000, 10_000):
            means = []
            for heard in (n, 64):
                counts = [asyncio.run(asked(n, heard, seed)) for seed in range(LOOKUPS)]
                means.append(f"{statistics.mean(counts):.1f} ({min(counts)} to {max(counts)})")
            print(f"N = {n:6}: nodes asked {means[0]}, having heard of 64: {means[1]}", flush=True)


if __name__ == "__main__":
    main()
