"""What is said on the local network, and what of it is believed."""

from __future__ import annotations

import pytest

from decentral.swarm.announcement import (
    MOST_ADDRESSES,
    host_of,
    local_addresses,
    read_announcement,
    run_tag,
    write_announcement,
)
from decentral.wire.keys import Signer, peer_name

RUN, OTHER_RUN = b"r" * 32, b"s" * 32
SIGNER, OTHER = Signer(bytes(32)), Signer(bytes([1]) * 32)
NAME, OTHER_NAME = peer_name(SIGNER.peer), peer_name(OTHER.peer)
HOME = f"/ip4/192.168.1.20/tcp/4001/p2p/{NAME}"


def strings(*words: str | bytes) -> bytes:
    packed = [word if isinstance(word, bytes) else word.encode() for word in words]
    return b"".join(bytes([len(word)]) + word for word in packed)


def said(*words: str | bytes) -> bytes:
    """A record of the run with these strings."""
    return strings(f"run={run_tag(RUN, SIGNER.peer)}", *words)


def test_what_is_written_is_read_again():
    sighting = read_announcement(write_announcement(RUN, SIGNER.peer, [HOME]), RUN)
    assert sighting is not None
    assert (sighting.peer, sighting.addresses) == (SIGNER.peer, (HOME,))


def test_the_bytes_are_as_they_always_were():
    assert write_announcement(RUN, SIGNER.peer, [HOME]) == (
        b"\x24run=07152d3dca921ef48a1bf4766450c0fc[dnsaddr=/ip4/192.168.1.20/tcp/4001/p2p/" + NAME.encode()
    )


def test_another_libp2p_node_reads_the_addresses_and_passes_over_the_run():
    """As @libp2p/mdns 12.0 does: of all strings those that begin with dnsaddr=, and each is a multiaddr with an id."""
    text, words = write_announcement(RUN, SIGNER.peer, [HOME]), []
    while text:
        words.append(text[1 : 1 + text[0]].decode())
        text = text[1 + text[0] :]
    assert [word.removeprefix("dnsaddr=") for word in words if word.startswith("dnsaddr=")] == [HOME]


def test_a_stranger_who_repeats_what_a_peer_said_under_its_own_name_is_not_believed():
    """Or it would be told the run's digest, with which it could join."""
    overheard = run_tag(RUN, SIGNER.peer)
    stranger = strings(f"run={overheard}", f"dnsaddr={HOME}".replace(NAME, OTHER_NAME))
    assert read_announcement(stranger, RUN) is None
    repeated = read_announcement(write_announcement(RUN, SIGNER.peer, [HOME]), RUN)
    assert repeated is not None
    assert repeated.peer == SIGNER.peer, "and whoever answers there has to prove that it is this one"


def test_who_listens_cannot_tell_which_run_it_is_nor_who_trains_together():
    assert run_tag(RUN, SIGNER.peer) != run_tag(RUN, OTHER.peer)
    assert run_tag(RUN, SIGNER.peer) != run_tag(OTHER_RUN, SIGNER.peer)
    assert RUN.hex()[:16] not in write_announcement(RUN, SIGNER.peer, [HOME]).decode("latin-1")


@pytest.mark.parametrize(
    "where",
    [
        "/ip4/45.67.0.1/tcp/4001",
        "/ip4/8.8.8.8/tcp/53",
        "/ip4/127.0.0.1/tcp/4001",
        "/ip4/0.0.0.0/tcp/4001",
        "/ip4/224.0.0.251/tcp/5353",
        "/ip4/100.64.0.1/tcp/4001",
        "/ip4/172.32.0.1/tcp/4001",
        "/ip4/255.255.255.255/tcp/1",
        "/ip6/2a02:45::1/tcp/4001",
        "/ip6/::1/tcp/4001",
        "/ip6/fe80::1/tcp/4001",
        "/ip6/fe80::1%eth0/tcp/4001",
        "/ip6/fd00::1%eth0/tcp/4001",
        "/ip6/::ffff:8.8.8.8/tcp/4001",
        "/ip4/fd00::1/tcp/4001",
        "/ip6/10.0.0.1/tcp/4001",
        "/dns4/10.0.0.1/tcp/4001",
        "/dns/router.local/tcp/80",
        "/ip4/10.0.0.1/udp/4001/quic-v1",
        "/ip4/10.0.0.1/tcp/0",
        "/ip4/10.0.0.1/tcp/65536",
        "/ip4/10.0.0.1/tcp/04001",
        "/ip4/10.0.0.01/tcp/4001",
        f"/ip4/10.0.0.1/tcp/4001/p2p/{OTHER_NAME}/p2p-circuit",
    ],
)
def test_only_private_networks_are_announced_and_believed(where):
    address = f"{where}/p2p/{NAME}"
    assert local_addresses([address]) == ()
    assert b"dnsaddr=" not in write_announcement(RUN, SIGNER.peer, [address])
    assert read_announcement(said(f"dnsaddr={address}"), RUN) is None
    beside = read_announcement(said(f"dnsaddr={address}", f"dnsaddr={HOME}"), RUN)
    assert beside is not None
    assert beside.addresses == (HOME,)


@pytest.mark.parametrize(
    "where", ["/ip4/10.9.8.7/tcp/1", "/ip4/172.16.0.1/tcp/65535", "/ip4/169.254.3.4/tcp/9", "/ip6/fd12::1/tcp/9"]
)
def test_every_kind_of_private_network_is(where):
    assert local_addresses([f"{where}/p2p/{NAME}"]) == (f"{where}/p2p/{NAME}",)


def test_bridges_of_containers_come_last_and_no_more_than_eight_are_named():
    bridges = [f"/ip4/172.17.0.{n}/tcp/4001/p2p/{NAME}" for n in range(1, 20)]
    chosen = local_addresses([*bridges, HOME])
    assert len(chosen) == MOST_ADDRESSES
    assert host_of(chosen[0]) == "192.168.1.20"
    assert len(write_announcement(RUN, SIGNER.peer, [*bridges, HOME])) < 1000


def test_another_run_and_other_programs_are_none_of_ours():
    assert read_announcement(write_announcement(OTHER_RUN, SIGNER.peer, [HOME]), RUN) is None
    assert read_announcement(strings(f"dnsaddr={HOME}"), RUN) is None
    assert read_announcement(strings("txtvers=1", b"\xff\0"), RUN) is None
    assert read_announcement(b"", RUN) is None
