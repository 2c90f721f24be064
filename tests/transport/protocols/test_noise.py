"""The handshake without a network: who is proven, and what altered bytes lead to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decentral.errors import PayloadError
from decentral.transport.protocols.messages import bytes_field, bytes_fields
from decentral.transport.protocols.noise import Cipher, Handshake
from decentral.wire.keys import Signer

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
