"""Who keeps a peer's pieces: members after it in the order of their ids, those of other machines first. Pure.

A ring, so that in a swarm whose peers all have machines of their own everybody keeps for as many as keep for it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence

from decentral.wire.keys import PeerId

Addresses = Mapping[PeerId, Sequence[str]]


def choose(me: PeerId, own: Sequence[str], others: Addresses, count: int) -> list[PeerId]:
    """``count`` of ``others``, or as many as there are, from their ids and addresses; ``own``: this peer's."""
    ring = sorted(others, key=lambda peer: (peer <= me, peer))
    taken, elsewhere = set(_hosts(own)), list[PeerId]()
    for peer in ring:
        hosts = set(_hosts(others[peer]))
        if not taken & hosts:
            elsewhere.append(peer)
            taken |= hosts
    rest = [peer for peer in ring if peer not in elsewhere]
    return [*elsewhere, *rest][:count]


def _hosts(addresses: Sequence[str]) -> Iterator[str]:
    """Machines that addresses name. A relay's is not that of who is behind it; each has a loopback of its own."""
    for address in addresses:
        _, kind, host, *_ = (*address.split("/"), "", "", "")
        if kind in ("ip4", "ip6") and "/p2p-circuit" not in address and not _is_loopback(host):
            yield host


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True
