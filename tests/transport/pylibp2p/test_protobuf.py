"""Our few lines of protobuf beside libp2p's own definitions and protobuf's parser: each reads what the other wrote."""

from __future__ import annotations

import anyio
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, StopMessage
from libp2p.relay.circuit_v2.pb.dcutr_pb2 import HolePunch

from decentral.errors import PayloadError
from decentral.transport.daemon.control import peer_to_id
from decentral.transport.holepunch import PunchMessage, punch_message, read_punch
from decentral.transport.protocols.circuit import (
    HopStatus,
    Reservation,
    admit,
    encode_grant,
    encode_refusal,
    pass_through,
    read_question,
    reserve,
)
from decentral.transport.protocols.identify import ask, tell
from decentral.transport.protocols.messages import bytes_fields, multiaddr_to_bytes, read_varint, varint
from decentral.wire.keys import PeerId, Signer, peer_name

HERE, THERE = "/ip4/45.67.0.9/tcp/4001", "/ip6/2a02:45:67::9/tcp/4001"
numbers = st.integers(0, 2**64 - 1)
peers = st.binary(min_size=32, max_size=32).map(lambda seed: Signer(seed).peer)
addresses = st.lists(st.sampled_from([HERE, THERE]), max_size=8)


class Ends:
    """A stream whose other side has said all it will say; ``sent`` is what it heard."""

    def __init__(self, peer: PeerId, *said: bytes) -> None:
        self.peer, self.sent = peer, b""
        self._said = b"".join(varint(len(message)) + message for message in said)

    async def send(self, data: bytes) -> None:
        self.sent += data

    async def receive_exactly(self, nbytes: int) -> bytes:
        taken, self._said = self._said[:nbytes], self._said[nbytes:]
        return taken

    async def aclose(self) -> None:
        return None

    def heard(self) -> bytes:
        """The one message that was sent."""
        nbytes, at = read_varint(self.sent)
        assert at + nbytes == len(self.sent)
        return self.sent[at:]


@given(peers, addresses, st.lists(st.sampled_from(["/ipfs/id/1.0.0", "/decentral/lease/1"]), max_size=8))
def test_their_definition_reads_what_is_told_of_a_peer(peer, where, protocols):
    ends = Ends(peer)
    anyio.run(tell, ends, peer, [f"{one}/p2p/{peer_name(peer)}" for one in where], protocols, HERE)
    told = Identify.FromString(ends.heard())
    assert told.public_key.endswith(peer)
    assert list(told.listen_addrs) == [multiaddr_to_bytes(one) for one in where]
    assert list(told.protocols) == protocols
    assert told.observed_addr == multiaddr_to_bytes(HERE)


@given(addresses, st.binary(max_size=500), st.lists(st.text(max_size=30), max_size=20))
def test_what_their_definition_tells_is_read_whatever_else_it_holds(where, record, protocols):
    told = Identify(
        listen_addrs=[multiaddr_to_bytes(one) for one in where],
        observed_addr=multiaddr_to_bytes(THERE),
        signedPeerRecord=record,
        protocols=protocols,
        agent_version="any",
    ).SerializeToString()
    proposal = [b"/multistream/1.0.0\n", b"/ipfs/id/1.0.0\n"]
    found = anyio.run(ask, Ends(bytes(32), *proposal, told))
    assert found.addresses == tuple(where)
    assert found.observed == THERE


@given(numbers, numbers, st.integers(0, 2**32 - 1))
def test_the_place_that_their_definition_grants_is_read_whatever_its_numbers(expires, nbytes, seconds):
    message = HopMessage(type=HopMessage.STATUS, status=100)
    message.reservation.expire = expires
    message.limit.data, message.limit.duration = nbytes, seconds
    place = anyio.run(reserve, Ends(bytes(32), message.SerializeToString()))
    assert place == Reservation(expires, nbytes or None, seconds or None)


@given(numbers, numbers, st.integers(0, 2**32 - 1), addresses)
def test_their_definition_reads_the_place_that_is_granted(expires, nbytes, seconds, where):
    message = HopMessage.FromString(encode_grant(Reservation(expires, nbytes, seconds), where))
    assert (message.type, message.status) == (HopMessage.STATUS, 100)
    assert (message.reservation.expire, message.limit.data, message.limit.duration) == (expires, nbytes, seconds)
    assert list(message.reservation.addrs) == [multiaddr_to_bytes(one) for one in where]


@pytest.mark.parametrize("status", HopStatus)
def test_their_definition_knows_every_status_by_the_same_name(status):
    assert HopMessage.FromString(encode_refusal(status)).status == status
    assert HopMessage.DESCRIPTOR.fields_by_name["status"].enum_type.values_by_number[status].name == status.name


@given(peers)
def test_a_connection_through_a_relay_is_asked_for_and_brought_in_the_same_words(peer):
    yes = HopMessage(type=HopMessage.STATUS, status=100).SerializeToString()
    ends = Ends(bytes(32), yes)
    anyio.run(pass_through, ends, peer)
    asked = HopMessage.FromString(ends.heard())
    assert (asked.type, asked.peer.id) == (HopMessage.CONNECT, peer_to_id(peer))
    assert read_question(asked.SerializeToString()) == peer

    brings = StopMessage(type=StopMessage.CONNECT)
    brings.peer.id = peer_to_id(peer)
    ends = Ends(bytes(32), brings.SerializeToString())
    assert anyio.run(admit, ends) == peer
    answered = StopMessage.FromString(ends.heard())
    assert (answered.type, answered.status) == (StopMessage.STATUS, 100)


@given(addresses, st.sampled_from(PunchMessage))
def test_what_is_said_before_two_dial_at_once_is_the_same_in_their_definition(where, kind):
    theirs = HolePunch.FromString(punch_message(kind, where))
    assert (theirs.type, list(theirs.ObsAddrs)) == (kind, [multiaddr_to_bytes(one) for one in where])
    assert read_punch(theirs.SerializeToString(), kind) == tuple(where)


@given(st.binary(max_size=200))
@example(b"\x00\x00")  # a field of number 0, which theirs refuses
def test_bytes_that_both_take_for_a_message_say_the_same_to_both(message):
    try:
        ours = bytes_fields(message)
        theirs = Identify.FromString(message)
    except (PayloadError, DecodeError):
        return
    assert ours.get(2, []) == list(theirs.listen_addrs)
    assert ours.get(4, [b""])[-1] == theirs.observed_addr
