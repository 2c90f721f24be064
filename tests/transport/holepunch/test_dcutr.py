"""What is said before two peers dial at once: the messages byte for byte, and whose addresses may be dialled."""

from __future__ import annotations

import anyio
import pytest

from decentral.errors import PayloadError, StreamClosed
from decentral.transport.holepunch import PunchMessage, packed, plausible, read, receive
from decentral.transport.multiaddr import to_bytes
from decentral.transport.protocols.messages import bytes_field, number_field
from decentral.wire.keys import Signer, peer_name

HERE, THERE = "/ip4/45.67.0.9/tcp/4001", "/ip6/2a02:45:67::9/tcp/4001"
CONNECT = number_field(1, 100)
NAME = peer_name(Signer(bytes(32)).peer)
EVERY = {"45.67.0.1", "10.0.0.1", "127.0.0.1", "relay.example.org", None}  # hosts of relays


class Sent:
    """A stream of which all has come already."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    async def send(self, data: bytes) -> None:
        raise AssertionError("nothing is sent")

    async def receive_exactly(self, nbytes: int, on_bytes=None) -> bytes:
        if nbytes > len(self.data):
            raise StreamClosed("it ended")
        taken, self.data = self.data[:nbytes], self.data[nbytes:]
        return taken


def test_messages_are_those_of_the_specification() -> None:
    assert packed(PunchMessage.SYNC).hex() == "08ac02"
    assert packed(PunchMessage.CONNECT, [HERE]).hex() == "08641208" + "042d430009060fa1"
    assert read(packed(PunchMessage.CONNECT, [HERE, THERE]), PunchMessage.CONNECT) == (HERE, THERE)
    assert read(packed(PunchMessage.SYNC), PunchMessage.SYNC) == ()


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\x08",
        b"\x00" * 9,
        packed(PunchMessage.SYNC),
        CONNECT + b"\x12\x7f",
        CONNECT + bytes_field(2, b"") * 64,
        b"\xff" * 9,
        CONNECT + b"\x18" + b"\xff" * 9 + b"\x02",
    ],
    ids=["nothing", "half a field", "zeros", "the other kind", "cut short", "too many fields", "no number", "65 bits"],
)
def test_a_message_that_makes_no_sense_is_refused(message: bytes) -> None:
    with pytest.raises(PayloadError, match="drop"):
        read(message, PunchMessage.CONNECT)


def test_addresses_that_are_none_are_passed_over_and_few_are_looked_at() -> None:
    useless = [b"", b"\xff" * 40, to_bytes("/dns4/example.org/udp/1/quic-v1")]
    message = CONNECT + b"".join(bytes_field(2, one) for one in [*useless, to_bytes(HERE)])
    assert read(message, PunchMessage.CONNECT)[-1] == HERE
    assert len(read(CONNECT + bytes_field(2, to_bytes(HERE)) * 60, PunchMessage.CONNECT)) == 16


def test_a_length_beyond_the_bound_is_refused_before_anything_is_read() -> None:
    async def script() -> None:
        with pytest.raises(PayloadError, match="more than 4096 bytes"):
            await receive(Sent(b"\xff\x7f"), PunchMessage.CONNECT)

    anyio.run(script)


@pytest.mark.parametrize(
    ("address", "relays"),
    [
        (HERE, EVERY),
        (THERE, EVERY),
        (f"{HERE}/p2p/{NAME}", EVERY),
        ("/ip4/192.168.7.7/tcp/22", {"10.0.0.1"}),
        ("/ip4/100.64.1.2/tcp/22", {"10.0.0.1"}),
        ("/ip6/fd00::7/tcp/22", {"10.0.0.1"}),
        ("/ip4/127.0.0.1/tcp/22", {"127.0.0.1"}),
        ("/ip6/::1/tcp/22", {"127.0.0.1"}),
        ("/ip4/0.0.0.0/tcp/22", set()),
        ("/ip4/224.0.0.1/tcp/22", set()),
        ("/ip4/255.255.255.255/tcp/22", set()),
        ("/ip4/169.254.169.254/tcp/80", set()),
        ("/ip6/::ffff:127.0.0.1/tcp/22", set()),
        ("/ip6/2002:7f00:1::/tcp/22", {"127.0.0.1"}),
        ("/ip6/64:ff9b::7f00:1/tcp/22", set()),
        ("/ip6/fe80::1/tcp/22", set()),
        ("/dns4/example.org/tcp/443", set()),
        ("/ip4/45.67.0.9/udp/4001/quic-v1", set()),
        ("/ip4/45.67.0.9/tcp/0", set()),
        (f"/ip4/45.67.0.1/tcp/4001/p2p/{NAME}/p2p-circuit", set()),
    ],
)
def test_only_addresses_as_public_as_the_relay_may_be_dialled(address: str, relays: set[str | None]) -> None:
    assert {relay for relay in EVERY if plausible([address], relay)} == relays


def test_few_of_many_addresses_are_dialled_and_each_once() -> None:
    many = [f"/ip4/45.67.0.{n}/tcp/4001" for n in range(200)]
    assert plausible([HERE, HERE, *many], None)[:2] == [("45.67.0.9", 4001), ("45.67.0.0", 4001)]
    assert len(plausible(many, None)) == 4
