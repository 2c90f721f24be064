"""Does each gateway behave as it is named? Asked from both sides with plain sockets.

That a packet does not arrive is shown without waiting: what is sent after it on the same way arrives first.
"""

from __future__ import annotations

import errno
import select
import socket

import pytest

from tests.natlab.lab import DUAL, IPV6
from tests.natlab.nat import FIREWALL, PORT_PRESERVING, SYMMETRIC, UDP_BLOCKED
from tests.natlab.probes import Ear, listening, tcp_seen_by

PORT = 6000
EVERY_NAT = [PORT_PRESERVING, SYMMETRIC]
every_nat = pytest.mark.parametrize("nat", EVERY_NAT, ids=lambda nat: nat.name)


def observers(lab, first, second):
    """Two public hosts and an ear on each."""
    return Ear(lab.public(first), 7000), Ear(lab.public(second), 7000)


def test_a_port_preserving_nat_shows_everybody_the_port_it_was_given_and_a_symmetric_one_another_each(lab):
    here, there = observers(lab, "here", "there")
    with here, there:
        for nat, ports in ((PORT_PRESERVING, 1), (SYMMETRIC, 3)):
            home = lab.household(nat.name, nat)
            with Ear(home.host("alice"), PORT) as alice:
                seen = [alice.seen_by(here), alice.seen_by(there)]
            assert {address for address, _ in seen} == {home.public_v4}
            assert len({PORT, *(port for _, port in seen)}) == ports  # by chance equal once in 20,000


@pytest.mark.parametrize(("nat", "ports"), [(PORT_PRESERVING, 1), (SYMMETRIC, 3)], ids=lambda x: getattr(x, "name", ""))
def test_tcp_is_mapped_as_udp_is(lab, nat, ports):
    here, there = lab.public("here"), lab.public("there")
    alice = lab.household("home", nat).host("alice")
    with listening(here, 80) as first, listening(there, 80) as second:
        seen = [tcp_seen_by(alice, PORT, door, (host.v4, 80)) for door, host in ((first, here), (second, there))]
    assert len({PORT, *(port for _, port in seen)}) == ports


@every_nat
def test_nothing_comes_in_but_answers_to_what_went_out(lab, nat):
    here, there = observers(lab, "here", "there")
    home = lab.household("home", nat)
    with here, there, Ear(home.host("alice"), PORT) as alice:
        mapped = alice.seen_by(here)
        there.say(b"a stranger", mapped)
        here.say(b"the answer", mapped)
        assert alice.hear() == (b"the answer", here.address)


@every_nat
def test_another_port_of_a_known_host_is_a_stranger_too(lab, nat):
    host = lab.public("here")
    home = lab.household("home", nat)
    with Ear(host, 7000) as here, Ear(host, 7001) as beside, Ear(home.host("alice"), PORT) as alice:
        mapped = alice.seen_by(here)
        beside.say(b"from another port", mapped)
        here.say(b"the answer", mapped)
        assert alice.hear() == (b"the answer", here.address)


@every_nat
def test_no_nat_hairpins(lab, nat):
    home = lab.household("home", nat)
    with (
        Ear(lab.public("here"), 7000) as here,
        Ear(home.host("alice"), PORT) as alice,
        Ear(home.host("bob"), PORT + 1) as bob,
    ):
        mapped = alice.seen_by(here)
        bob.say(b"by the public address", mapped)
        bob.say(b"by the private one", alice.address)
        assert alice.hear() == (b"by the private one", bob.address)


@every_nat
def test_a_stranger_who_knocks_by_tcp_hears_nothing_not_even_a_refusal(lab, nat):
    """A RST would end the hole-puncher's own attempt."""
    host = lab.public("here")
    home = lab.household("home", nat)
    with (
        Ear(host, 7000) as here,
        Ear(home.host("alice"), PORT) as alice,
        host.socket(kind=socket.SOCK_STREAM) as knocker,
    ):
        knocker.setblocking(False)
        assert knocker.connect_ex((home.public_v4, PORT)) == errno.EINPROGRESS
        here.say(b"after the knock", alice.seen_by(here))
        assert alice.hear()[0] == b"after the knock"
        assert select.select([], [knocker], [], 0)[1] == []


def test_two_port_preserving_nats_can_be_punched_and_two_symmetric_ones_cannot(lab):
    with Ear(lab.public("here"), 7000) as here:
        for nat, punched in ((PORT_PRESERVING, True), (SYMMETRIC, False)):
            a, b = (lab.household(f"{nat.name} {name}", nat) for name in "ab")
            with Ear(a.host("alice"), PORT) as alice, Ear(b.host("bob"), PORT) as bob:
                of_alice, of_bob = alice.seen_by(here), bob.seen_by(here)
                alice.say(b"opens", of_bob)
                bob.say(b"punched", of_alice)
                here.say(b"by the server", of_alice)
                # Both are on their way to Alice; the server's packet was sent last.
                assert (alice.hear()[0] == b"punched") == punched


def test_where_udp_is_blocked_tcp_passes_and_udp_does_not(lab):
    host = lab.public("here")
    alice = lab.household("office", UDP_BLOCKED).host("alice")
    with Ear(host, 7000) as here, Ear(alice, PORT) as ear, listening(host, 80) as door:
        ear.say(b"blocked", here.address)
        tcp_seen_by(alice, PORT, door, (host.v4, 80))
        here.socket.setblocking(False)
        with pytest.raises(BlockingIOError):
            here.hear()


def test_a_carrier_grade_nat_is_two_layers_and_the_outer_one_decides_the_port(lab):
    here, there = observers(lab, "here", "there")
    home = lab.household("home", PORT_PRESERVING, carrier=SYMMETRIC)
    with here, there, Ear(home.host("alice"), PORT) as alice:
        seen = [alice.seen_by(here), alice.seen_by(there)]
        assert {address for address, _ in seen} == {home.public_v4}
        assert len({PORT, *(port for _, port in seen)}) == 3
    assert "100.64." in home.gateway.run("ip", "-4", "addr", "show", "wan")


def test_an_ipv6_firewall_translates_nothing_and_lets_only_answers_in(lab):
    here, there = (Ear(lab.public(name, families=IPV6), 7000, socket.AF_INET6) for name in ("here", "there"))
    host = lab.household("home", FIREWALL, families=IPV6).host("alice")
    with here, there, Ear(host, PORT, socket.AF_INET6) as alice:
        assert alice.seen_by(here) == alice.address
        there.say(b"a stranger", alice.address)
        here.say(b"the answer", alice.address)
        assert alice.hear() == (b"the answer", here.address)


def test_an_ipv6_only_host_has_no_way_to_ipv4(lab):
    public = lab.public("here", families=DUAL)
    host = lab.household("home", FIREWALL, families=IPV6).host("alice")
    with host.socket() as v4, pytest.raises(OSError, match="Network is unreachable"):
        v4.sendto(b"?", (public.v4, 7000))


def test_a_dual_stack_host_is_translated_in_ipv4_only(lab):
    public = lab.public("here", families=DUAL)
    home = lab.household("home", SYMMETRIC, families=DUAL)
    alice = home.host("alice")
    with Ear(public, 7000) as v4, Ear(alice, PORT) as ear:
        assert ear.seen_by(v4)[0] == home.public_v4
    with Ear(public, 7000, socket.AF_INET6) as v6, Ear(alice, PORT, socket.AF_INET6) as ear:
        assert ear.seen_by(v6) == (alice.v6, PORT)
