"""Real multicast DNS, over the loopback of this machine."""

from __future__ import annotations

import anyio
import pytest

from decentral.errors import ListenError
from decentral.swarm.announcement import write_announcement
from decentral.swarm.mdns import on_air, usable_hosts
from decentral.wire.keys import Signer, peer_name

HERE = ["127.0.0.1"]


def test_what_one_says_another_hears_whoever_came_first():
    peer = Signer.generate().peer
    first, second = (
        write_announcement(bytes(32), peer, [f"/ip4/192.168.1.{n}/tcp/4001/p2p/{peer_name(peer)}"]) + b"\0"
        for n in (1, 2)
    )
    heard: dict[str, set[bytes]] = {"first": set(), "second": set()}

    async def main():
        with anyio.fail_after(10):
            async with on_air(HERE, first, 4001, heard["first"].add), on_air(HERE, second, 4001, heard["second"].add):
                while second not in heard["first"] or first not in heard["second"]:
                    await anyio.sleep(0.02)

    anyio.run(main)


def test_where_there_is_no_network_for_it_one_line_says_so():
    with pytest.raises(ListenError, match="no network of this machine takes part"):
        usable_hosts(["fd00::1", "203.0.113.77"])
    assert usable_hosts(["203.0.113.77", *HERE]) == HERE
