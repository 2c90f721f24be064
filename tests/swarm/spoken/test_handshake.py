"""Two sides of a handshake, and a third one between them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decentral.errors import PayloadError
from decentral.swarm.words import ELEMENT_NBYTES, PROOF_NBYTES, WordsHandshake

GUEST, HOST, THIRD = (bytes([n]) * 32 for n in (1, 2, 3))
RIGHT, WRONG = b"acid cargo mural tulip 4711", b"acid cargo mural zoom 4711"


def guest(password: bytes = RIGHT, me: bytes = GUEST, host: bytes = HOST) -> WordsHandshake:
    return WordsHandshake(password, me, host, is_guest=True)


def host(password: bytes = RIGHT, me: bytes = HOST, other: bytes = GUEST) -> WordsHandshake:
    return WordsHandshake(password, other, me, is_guest=False)


def met(one: WordsHandshake, other: WordsHandshake) -> tuple[WordsHandshake, WordsHandshake]:
    one.hear(other.first)
    other.hear(one.first)
    return one, other


def test_who_knows_the_words_proves_it_and_reads_the_invite() -> None:
    asks, gives = met(guest(), host())
    assert gives.takes(asks.proof())
    assert asks.open(gives.seal(b"decentral1:abc")) == b"decentral1:abc"


def test_wrong_words_prove_nothing_and_open_nothing() -> None:
    asks, gives = met(guest(WRONG), host())
    assert not gives.takes(asks.proof())
    with pytest.raises(PayloadError, match="does not know them"):
        asks.open(gives.seal(b"decentral1:abc"))


def test_a_third_one_that_passes_everything_on_gets_nowhere() -> None:
    """Each side speaks with the third one's transport, and the keys of both transports are in what is agreed."""
    asks, gives = guest(host=THIRD), host(other=THIRD)
    met(asks, gives)
    assert not gives.takes(asks.proof())


def test_messages_sent_back_to_their_sender_are_refused() -> None:
    for side in (guest(), host()):
        with pytest.raises(PayloadError, match="OffSides"):
            side.hear(side.first)
    asks = guest()
    mirrored = b"B" + asks.first[1:]
    with pytest.raises(PayloadError, match="ReflectionThwarted"):
        asks.hear(mirrored)


def test_a_proof_sent_back_is_no_invite_and_one_of_another_handshake_no_proof() -> None:
    asks, gives = met(guest(), host())
    with pytest.raises(PayloadError):
        asks.open(asks.proof())
    again, _ = met(guest(), host())
    assert not gives.takes(again.proof())


def test_a_sealed_invite_that_was_altered_is_not_opened() -> None:
    asks, gives = met(guest(), host())
    sealed = bytearray(gives.seal(b"decentral1:abc"))
    sealed[3] ^= 1
    with pytest.raises(PayloadError):
        asks.open(bytes(sealed))


def test_what_crosses_the_wire_is_as_long_as_it_is_read() -> None:
    asks, gives = met(guest(), host())
    assert len(asks.first) == len(gives.first) == ELEMENT_NBYTES
    assert len(asks.proof()) == PROOF_NBYTES


SMALL_ORDER = [bytes(32), b"\x01" + bytes(31), bytes.fromhex("ec" + "ff" * 30 + "7f")]


@pytest.mark.parametrize("point", SMALL_ORDER)
def test_a_point_that_would_make_the_key_guessable_is_refused(point: bytes) -> None:
    with pytest.raises(PayloadError):
        host().hear(b"A" + point)


@given(st.binary(max_size=80))
@settings(max_examples=60, deadline=None)
def test_any_bytes_are_a_first_message_or_a_payload_error(data: bytes) -> None:
    side = host()
    try:
        side.hear(data)
    except PayloadError:
        return
    assert not side.takes(bytes(PROOF_NBYTES))
