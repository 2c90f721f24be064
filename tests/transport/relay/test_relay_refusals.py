"""What the relay refuses, by which word, and the bounds it is given."""

from __future__ import annotations

import inspect
import time

import anyio
import pytest

from decentral.errors import ConfigError, TransportError
from decentral.transport.native.links import LinkOptions
from decentral.transport.native.relay import Relay
from decentral.transport.protocols.circuit import HopStatus, RelayLimits, network_of, read_message, write_message
from decentral.transport.protocols.messages import bytes_fields, multiaddr_to_text, number_field, number_fields
from decentral.wire.keys import Signer
from tests.kit.relays import (
    RESERVE,
    asking,
    connect_to,
    native,
    relay,
    status,
    take_place,
    until,
)

NOBODY = Signer(bytes([77]) * 32).peer


async def it_takes_a_place_by_hand(at, a, b):
    await take_place(at, b)  # and expects nobody's connections
    return connect_to(b.peer)


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        pytest.param(lambda at, a, b: connect_to(NOBODY), HopStatus.NO_RESERVATION, id="nobody is at home"),
        pytest.param(lambda at, a, b: connect_to(b.peer), HopStatus.NO_RESERVATION, id="it has no place"),
        pytest.param(lambda at, a, b: connect_to(a.peer), HopStatus.PERMISSION_DENIED, id="it asks for itself"),
        pytest.param(it_takes_a_place_by_hand, HopStatus.CONNECTION_FAILED, id="the other does not take it"),
        pytest.param(lambda at, a, b: number_field(1, 2), HopStatus.UNEXPECTED_MESSAGE, id="that is no question"),
        pytest.param(lambda at, a, b: b"\xff\xff\xff", HopStatus.MALFORMED_MESSAGE, id="that is no message"),
        pytest.param(lambda at, a, b: number_field(1, 1), HopStatus.MALFORMED_MESSAGE, id="it names nobody"),
    ],
)
async def test_what_cannot_be_is_refused_by_its_own_word(ask, answer):
    at, a, b = relay(), native(), native()
    async with at, a, b:
        await b.connect(at.peer, at.addresses())
        await a.connect(at.peer, at.addresses())
        question = ask(at, a, b)
        assert await status(at, a, await question if inspect.isawaitable(question) else question) == answer
        assert at.relay.counts.refused == {answer: 1}
        assert at.relay.connections == 0


@pytest.mark.parametrize("limits", [{"places": 2}, {"places_per_network": 2}])
async def test_places_are_refused_above_the_bound_and_who_has_one_may_renew_it(limits):
    at = relay(**limits)
    peers = [native() for _ in range(3)]
    async with at, peers[0], peers[1], peers[2]:
        for peer in peers[:2]:
            assert await status(at, peer, RESERVE) == HopStatus.OK
        assert await status(at, peers[2], RESERVE) == HopStatus.RESERVATION_REFUSED
        assert await status(at, peers[0], RESERVE) == HopStatus.OK
        with pytest.raises(TransportError, match="says no"):
            await take_place(at, peers[2])
        assert at.relay.places == 2


async def test_a_place_names_its_end_its_terms_and_where_the_relay_is():
    at, a = relay(nbytes=1 << 40, seconds=600, place_seconds=900), native()
    async with at, a, asking(at, a) as stream:
        await write_message(stream, RESERVE)
        fields = bytes_fields(await read_message(stream))
        addresses = bytes_fields(fields[3][0])[2]
        assert [multiaddr_to_text(address) for address in addresses] == list(at.addresses())
        assert number_fields(fields[4][0]) == {1: 600, 2: 1 << 40}
        assert abs(number_fields(fields[3][0])[1] - time.time() - 900) < 5
        assert (await take_place(at, a)).nbytes == 1 << 40


async def test_a_place_ends_with_the_last_connection_of_its_peer():
    at, a = relay(), native()
    async with at:
        async with a:
            await take_place(at, a)
            assert at.relay.has_place(a.peer)
        await until(lambda: not at.relay.has_place(a.peer))


class Guests:
    """What a relay sees of its transport's links: here the sessions only."""

    def __init__(self, hosts):
        self.hosts, self.sessions, self.dialler, self.options = hosts, self, None, LinkOptions()
        self.addresses = tuple

    def host_of(self, peer):
        return self.hosts.get(peer)


async def test_places_expire_when_they_are_not_renewed(virtual_time):
    one, two = b"1" * 32, b"2" * 32
    served = Relay(Guests({one: "192.0.2.1", two: "192.0.2.2"}), RelayLimits(places=1))
    served.give_place(one)
    await anyio.sleep(3599)
    with pytest.raises(TransportError, match="all 1 places are taken"):
        served.give_place(two)
    await anyio.sleep(2)
    assert (served.places, served.has_place(one)) == (0, False)
    served.give_place(two)
    assert served.has_place(two)


async def test_who_did_not_come_directly_gets_no_place(virtual_time):
    with pytest.raises(TransportError, match="permission_denied"):
        Relay(Guests({}), RelayLimits()).give_place(b"1" * 32)


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("relay.example.org", "relay.example.org"),
    ],
)
def test_a_network_is_an_address_or_what_one_customer_gets(host, network):
    assert network_of(host) == network


@pytest.mark.parametrize(
    "wrong",
    [{"places": 0}, {"connections": 0}, {"nbytes": 131072}, {"nbytes": 1 << 64}, {"seconds": 1}, {"rate": 0.0}],
)
def test_limits_that_cannot_be_meant_are_refused(wrong):
    with pytest.raises(ConfigError, match=f"RelayLimits\\({next(iter(wrong))}="):
        RelayLimits(**wrong)


def test_more_memory_carries_more_connections_and_too_little_none():
    small, large = (RelayLimits.within(mb * 10**6, places=128) for mb in (256, 400))
    assert 1 < small.connections < large.connections
    with pytest.raises(ConfigError, match="allow more memory"):
        RelayLimits.within(64 * 10**6, places=128)
