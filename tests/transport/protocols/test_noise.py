"""The handshake without a network: who is proven, and what altered bytes lead to."""

import socket
import struct
import sys
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread
import pytest
from anyio.abc import SocketAttribute, SocketStream
from hypothesis import given
from hypothesis import strategies as st

from decentral.errors import PayloadError, StreamClosed
from decentral.transport.protocols.messages import bytes_field, bytes_fields
from decentral.transport.protocols.noise import Cipher, Handshake, Plain, Secured
from decentral.wire.keys import Signer
from tests.kit.patience import PATIENCE

SIOCOUTQNSD = 0x894B  # bytes of a socket that have not left yet, of linux/sockios.h
ALICE, BOB = Signer(bytes(range(32))), Signer(bytes(range(1, 33)))


def messages(alter=lambda number, message: message):
    """A whole handshake; ``alter`` sees each message on its way. Both sides' findings."""
    dials, dialled = Handshake(ALICE), Handshake(BOB)
    hello = alter(0, dials.hello())
    answer = alter(1, dialled.answer(hello))
    last, *found = dials.finish(answer)
    return found, dialled.conclude(alter(2, last))


def test_both_sides_learn_who_the_other_is_and_can_talk_both_ways():
    (bob, to_bob, from_bob), (alice, to_alice, from_alice) = messages()
    assert (alice, bob) == (ALICE.peer, BOB.peer)
    for words in (b"", b"one", b"two" * 20_000):
        assert from_alice.open(to_bob.seal(words)) == words
        assert from_bob.open(to_alice.seal(words)) == words


def test_the_messages_are_as_long_as_the_documentation_says():
    lengths = {}
    messages(lambda number, message: lengths.setdefault(number, len(message)) and message)
    assert lengths == {0: 32, 1: 200, 2: 168}


@given(st.integers(0, 2), st.integers(0, 31), st.integers(1, 255), st.booleans())
def test_an_altered_handshake_ends_for_somebody_with_a_payload_error(number, at, flip, at_the_end):
    def alter(which, message):
        if which != number:
            return message
        index = len(message) - 1 - at if at_the_end else at
        return message[:index] + bytes([message[index] ^ flip]) + message[index + 1 :]

    def talk():
        (_, to_bob, _), (_, _, from_alice) = messages(alter)
        from_alice.open(to_bob.seal(b"the top bit of a curve's point says nothing; the transcript's hash does"))

    with pytest.raises(PayloadError):
        talk()


@given(st.integers(0, 2), st.binary(max_size=300))
def test_any_other_bytes_end_with_a_payload_error(number, junk):
    with pytest.raises(PayloadError):
        messages(lambda which, message: junk if which == number else message)


def test_a_key_that_somebody_else_signed_is_refused():
    class Impostor(Signer):
        def sign(self, data: bytes) -> bytes:
            return ALICE.sign(data)

    impostor = Impostor(bytes(32))
    dials, dialled = Handshake(BOB), Handshake(impostor)
    answer = dialled.answer(dials.hello())
    with pytest.raises(PayloadError, match="did not sign its key"):
        dials.finish(answer)


def test_a_message_is_taken_once_and_in_its_place():
    sends, takes = Cipher(bytes(32)), Cipher(bytes(32))
    first, second = sends.seal(b"first"), sends.seal(b"second")
    assert takes.open(first) == b"first"
    for wrong in (first, second):  # a replay; and one that comes after it has lost its place
        with pytest.raises(PayloadError, match="altered"):
            takes.open(wrong)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_payload_error(data):
    try:
        found = bytes_fields(data)
    except PayloadError:
        return
    assert sum(len(value) for values in found.values() for value in values) <= len(data)


def test_fields_come_back_by_their_number_and_numbers_are_passed_over():
    message = bytes_field(1, b"key") + b"\x18\x2a" + bytes_field(2, b"") + bytes_field(1, b"x" * 300)
    assert bytes_fields(message) == {1: [b"key", b"x" * 300], 2: [b""]}


# ---- a message that comes a little at a time ----


class Counting:
    """A socket, and how often it was read."""

    def __init__(self, inner):
        self.inner, self.reads = inner, 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    async def receive(self, max_bytes):
        self.reads += 1
        return await self.inner.receive(max_bytes)


@asynccontextmanager
async def two_ends():
    """Both ends of a connection on loopback: one to send on, and one read as messages are, with its count."""
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        port = listener.extra(SocketAttribute.local_port)
        near = await anyio.connect_tcp("127.0.0.1", port)
        far = await SocketStream.from_socket(await anyio.to_thread.run_sync(accept, listener))
        plain = Plain(far)
        plain._socket = counting = Counting(far)
        async with near, far:
            yield near, plain, counting


def accept(listener):
    raw = listener.listeners[0].extra(SocketAttribute.raw_socket)
    raw.setblocking(True)
    made, _ = raw.accept()
    raw.setblocking(False)
    made.setblocking(False)
    return made


async def say(near, message, piece):
    """Send it as a thin line would bring it: the reader may look after every piece."""
    for start in range(0, len(message), piece):
        await near.send(message[start : start + piece])
        await anyio.wait_all_tasks_blocked()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a system may not know SO_RCVLOWAT, or wake early")
async def test_a_message_that_comes_a_kilobyte_at_a_time_is_read_a_few_times():
    message = bytes(range(256)) * 240
    async with two_ends() as (near, plain, counting):
        for _ in range(3):
            found = []
            async with anyio.create_task_group() as group:
                group.start_soon(say, near, len(message).to_bytes(2, "big") + message, 1000)
                found.append(await plain.receive_message())
            assert found == [message]
        assert counting.reads <= 3 * 4


@pytest.mark.parametrize("sent", [1, 2, 10, 40_000])
async def test_a_message_that_ends_early_is_known_to_at_once(sent):
    async with two_ends() as (near, plain, _):
        await near.send(((50_000).to_bytes(2, "big") + bytes(50_000))[:sent])
        await near.send_eof()
        with anyio.fail_after(PATIENCE), pytest.raises(StreamClosed):
            await plain.receive_message()


async def test_short_messages_after_a_long_one_are_not_waited_for_in_vain():
    async with two_ends() as (near, plain, _):
        for length in (60_000, 3, 1, 40_000, 1):
            await near.send(length.to_bytes(2, "big") + bytes(length))
            with anyio.fail_after(PATIENCE):
                assert await plain.receive_message() == bytes(length)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a system may not say what has not left")
async def test_the_system_takes_little_that_the_other_side_does_not_read():
    """What it has taken, votes wait behind: at 50 kB/s for 3 s where it took 160 kB."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)
        async with await anyio.connect_tcp(*server.getsockname()) as near:  # nobody ever accepts it
            await fill(near)


async def fill(near):
    """Send until nothing more is taken; then little waits in this system."""
    import fcntl

    Plain(near)
    raw = near.extra(SocketAttribute.raw_socket)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    with anyio.move_on_after(1.0) as blocked:
        for _ in range(1 << 12):
            await near.send(bytes(8192))
    waiting = struct.unpack("i", fcntl.ioctl(raw.fileno(), SIOCOUTQNSD, bytes(4)))[0]
    assert blocked.cancelled_caught
    assert waiting < 1 << 17


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a system may not say")
async def test_the_system_tells_how_fast_bytes_arrive():
    async with two_ends() as (near, plain, _):
        there = Plain(near)
        assert there.delivery_rate() is None
        async with anyio.create_task_group() as group:
            group.start_soon(near.send, bytes(1 << 22))
            await plain.receive_exactly(1 << 22)
        rate = there.delivery_rate()
        assert rate is not None
        assert 1e5 < rate < 1e12
    assert there.delivery_rate() is None


class Held:
    """A connection on which one message came."""

    def __init__(self, message):
        self.message = message

    async def receive_message(self):
        message, self.message = self.message, None
        assert message is not None, "nothing more comes"
        return message


async def test_to_read_nothing_loses_nothing_of_what_came():
    sends, takes = Cipher(bytes(32)), Cipher(bytes(32))
    secured = Secured(Held(sends.seal(b"one message")), ALICE.peer, Cipher(bytes(32)), takes)
    assert await secured.receive_exactly(4) == b"one "
    assert await secured.receive_exactly(0) == b""
    assert await secured.receive_exactly(7) == b"message"
