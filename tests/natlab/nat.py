"""The boxes that people sit behind, as rules of nftables for one gateway with interfaces ``lan`` and ``wan``.

All of them filter by address and port: nothing comes in but answers to what went out. They differ in the mapping, in
RFC 4787's words: a port-preserving one shows the same public port to every destination (endpoint-independent, for as
long as no two hosts want one port), so that two of them can be punched; a symmetric one draws a port per destination.
None hairpins, and none answers to strangers: without the ``input`` rules Linux would send a RST to a hole-puncher's
first packet, or take the five-tuple that the answer needs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Nat:
    """One kind of gateway."""

    name: str
    masquerade: str | None  # nft's statement; None: addresses pass unchanged
    udp: bool = True  # whether UDP passes

    def rules(self) -> str:
        """The gateway's rules. IPv6 is never translated, and filtered alike."""
        translate = f'oifname "wan" {self.masquerade};' if self.masquerade else ""
        no_udp = "" if self.udp else "meta l4proto udp drop;"
        return f"""
table ip nat {{
  chain postrouting {{ type nat hook postrouting priority 100; {translate} }}
}}
table inet filter {{
  chain input {{
    type filter hook input priority 0; policy drop;
    meta l4proto {{ icmp, ipv6-icmp }} accept;
    ct state {{ established, related }} accept;
    iifname "lo" accept;
  }}
  chain forward {{
    type filter hook forward priority 0; policy accept;
    {no_udp}
    ct state invalid drop;
    iifname "wan" ct state new drop;
  }}
}}"""


PORT_PRESERVING = Nat("port-preserving", "masquerade")
SYMMETRIC = Nat("symmetric", "masquerade fully-random")
UDP_BLOCKED = Nat("udp-blocked", "masquerade", udp=False)
FIREWALL = Nat("firewall", None)  # what IPv6 has instead of a NAT
