"""Bytes and messages per peer against the size of the swarm, by the model that real peers were held against.

    python experiments/cost/figure.py docs/cost.png

A model of 25 million values. Dashed: beyond the 1,024 peers that one epoch can have.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import torch

from decentral.compressors import parse_compressor
from decentral.replica.codec import Codec
from decentral.simulate import cost
from decentral.training import round_cost
from decentral.training.round_cost import Cost
from decentral.wire.keys import Signer
from decentral.wire.messages import MAX_PEERS, Lease, encode, seal_lease

NUMEL = 25_000_000
MEASURED = 1 << 20  # values encoded; larger bodies are multiples
LEASE_SECONDS = 15
GROUP = 32
ADDRESSES = tuple(
    f"/ip4/203.0.113.77/{way}/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
    for way in ("tcp/31330", "udp/31330/quic-v1")
)


def body(chain: str) -> round_cost.Body:
    codec = Codec(parse_compressor(chain))

    @cache
    def measured(numel: int) -> int:
        return len(codec.encode(torch.randn(numel, generator=torch.Generator().manual_seed(0)), {}, ((numel,),)).body)

    return lambda numel: measured(min(numel, MEASURED)) * max(1.0, numel / MEASURED)


def lines() -> dict[str, Callable[[int], Cost]]:
    sparse, dense, half = body("topk(k=64, chunk=4096) >> signmag2"), body("int8(block=4096)"), body("fp16")
    signer = Signer(bytes(32))
    lease = seal_lease(
        Lease(bytes(32), signer.peer, 1, LEASE_SECONDS, ADDRESSES, 1, 1, bytes(32), 1, 0, "0.1.0"), signer
    )
    minute = 60 / (LEASE_SECONDS / 3)
    print(f"a lease of {len(encode(lease))} bytes; frames: sparse {sparse(NUMEL):.0f}, int8 {dense(NUMEL):.0f} bytes")
    return {
        "pair: frames (fp16)": lambda n: round_cost.pair(n, NUMEL, half),
        "reduce: frames (int8)": lambda n: round_cost.reduce(n, NUMEL, dense),
        "gather: frames (64 of 4096, 2 bits)": lambda n: round_cost.gather(n, NUMEL, sparse),
        f"gather in groups of {GROUP}": lambda n: cost.in_groups(n, NUMEL, sparse, GROUP),
        "gather: control messages": lambda n: round_cost.control("gather", n, NUMEL),
        "reduce: control messages": lambda n: round_cost.control("reduce", n, NUMEL),
        "directory, a minute": lambda n: cost.renewal(n, lease).times(minute),
        "DHT, a minute": lambda n: cost.lookups(n, lease).times(minute),
    }


def main() -> None:
    sizes = sorted(
        {2 * round(10 ** (0.05 * step) / 2) for step in range(6, 81)} | set(TABLE)
    )  # odd ones leave one over
    figure, (left, right) = plt.subplots(1, 2, figsize=(12.5, 5.6))
    for number, (name, of) in enumerate(lines().items()):
        costs = [of(n) for n in sizes]
        shown = [f"{n}: {c.nbytes:.3g} B, {c.messages:.3g}" for n, c in zip(sizes, costs, strict=True) if n in TABLE]
        print(name, "|", "; ".join(shown))
        for axes, values in ((left, [c.nbytes for c in costs]), (right, [c.messages for c in costs])):
            inside = np.array(sizes) <= MAX_PEERS
            axes.plot(np.array(sizes)[inside], np.array(values)[inside], color=f"C{number}", label=name)
            axes.plot(np.array(sizes)[~inside], np.array(values)[~inside], color=f"C{number}", linestyle=":")
    for axes, what in ((left, "bytes sent per peer"), (right, "messages sent per peer")):
        axes.set(xscale="log", yscale="log", xlabel="peers", ylabel=f"{what}, a round")
        axes.grid(alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), loc="lower center", ncols=4, frameon=False)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.savefig(sys.argv[1], dpi=110)


TABLE = (2, 8, 32, 100, MAX_PEERS, 10_000)

if __name__ == "__main__":
    main()
