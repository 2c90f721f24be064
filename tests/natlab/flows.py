"""Who sent how much to whom, counted where nobody can claim anything: by the kernel, at the core and at home."""

from __future__ import annotations

import ipaddress
import json
from collections import Counter
from collections.abc import Iterable

from tests.natlab.namespaces import Namespace

TABLE = """
table inet core {
  set flows4 { type ipv4_addr . ipv4_addr . inet_proto; flags dynamic; size 4096; counter; }
  set flows6 { type ipv6_addr . ipv6_addr . inet_proto; flags dynamic; size 4096; counter; }
  chain faults { }
  chain forward {
    type filter hook forward priority 0; policy accept;
    jump faults
    meta nfproto ipv4 update @flows4 { ip saddr . ip daddr . meta l4proto }
    meta nfproto ipv6 update @flows6 { ip6 saddr . ip6 daddr . meta l4proto }
  }
}
"""

HOME_TABLE = """
table inet home {{
  counter sent {{ }}
  chain output {{
    type filter hook output priority 0; policy accept;
    ip daddr 10.{number}.0.0/24 counter name sent
    ip6 daddr {v6} counter name sent
  }}
}}
"""

V4 = "45.67.{}.0/24"  # a household's public addresses
V6_LINE = "2a02:45:ff:{}::/64"  # its line's IPv6 addresses
V6_HOME = "2a02:45:67:{}::/64"  # its own IPv6 addresses

Flow = tuple[int, int, str]  # from household, to household, protocol


def read_flows(core: Namespace) -> Counter[Flow]:
    """Bytes that crossed the core since the lab began, IP headers included."""
    found: Counter[Flow] = Counter()
    for name in ("flows4", "flows6"):
        listed = json.loads(core.run("nft", "-j", "list", "set", "inet", "core", name))["nftables"]
        for element in (one for item in listed if "set" in item for one in item["set"].get("elem", ())):
            source, target, protocol = element["elem"]["val"]["concat"]
            found[household(source), household(target), str(protocol)] += element["elem"]["counter"]["bytes"]
    return found


def read_home(host: Namespace) -> int:
    """Bytes that a host has sent to others of its household."""
    listed = json.loads(host.run("nft", "-j", "list", "counter", "inet", "home", "sent"))["nftables"]
    return sum(item["counter"]["bytes"] for item in listed if "counter" in item)


def household(address: str) -> int:
    """The number of the household that an address of the public segment belongs to."""
    if ":" in address:
        return int(ipaddress.IPv6Address(address).exploded.split(":")[3], 16)
    return int(address.split(".")[2])


def between(flows: Counter[Flow], some: Iterable[int], others: Iterable[int]) -> int:
    """Bytes that went either way between two groups of households."""
    left, right = set(some), set(others)
    return sum(
        nbytes
        for (source, target, _), nbytes in flows.items()
        if (source in left and target in right) or (source in right and target in left)
    )
