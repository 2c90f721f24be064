"""What is said, and what somebody types who heard it."""

from __future__ import annotations

import random

import pytest

from decentral.errors import InviteError, PayloadError
from decentral.swarm.words import (
    ELEMENT_NBYTES,
    PROOF_NBYTES,
    SpokenCode,
    WordsHandshake,
    known_words,
    looks_spoken,
    new_code,
    parse_code,
)

CODE = SpokenCode(("acid", "cargo", "mural", "tulip"), 4711)


def test_a_code_is_read_as_it_was_said() -> None:
    rng = random.Random(0)
    for _ in range(200):
        code = new_code(rng.randrange)
        assert parse_code(str(code)) == code
        assert looks_spoken(str(code))
    for line in ("decentral1:abc", "decentral join decentral1:abc", "word"):
        assert not looks_spoken(line)


@pytest.mark.parametrize(
    "heard", ["Acid Cargo  MURAL tulip 4711", "acid-cargo-mural-tulip-4711", "acid, cargo, mural, tulip, 4711"]
)
def test_case_spaces_and_dashes_do_not_matter(heard: str) -> None:
    assert str(parse_code(heard)) == str(CODE) == "acid cargo mural tulip 4711"


@pytest.mark.parametrize(
    ("heard", "words"),
    [
        ("acid cargo mural tulip tulip 4711", "6 of 5"),
        ("acid cargo mural tulip", "4 of 5"),
        ("acid cargo mural tulip 47", "'47' is no number from 1000"),
        ("acid cargo mural tulip \u0664\u0667\u0661\u0661", "is no number"),
        ("acid cargo murall tulip 4711", "perhaps mural"),
        ("acid cargo \x1b[2J tulip 4711", "is none of them"),
    ],
)
def test_what_is_no_code_is_one_line_and_no_try(heard: str, words: str) -> None:
    with pytest.raises(InviteError, match="words: ") as caught:
        parse_code(heard)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_the_list_is_the_one_that_its_licence_names() -> None:
    words = known_words()
    assert len(set(words)) == len(words) == 1295
    assert all(3 <= len(word) <= 5 and word.isascii() for word in words)
    assert (words[0], words[-1]) == ("acid", "zoom")


def test_the_address_follows_from_the_number_alone_and_the_password_from_all() -> None:
    other = SpokenCode(("zoom", "cargo", "mural", "tulip"), 4711)
    assert (other.host, other.topic) == (CODE.host, CODE.topic)
    assert other.password != CODE.password
    assert SpokenCode(CODE.words, 4712).host != CODE.host


# ---- test handshake ----
#
# Two sides of a handshake, and a third one between them.

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
