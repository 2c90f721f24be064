"""What is said, and what somebody types who heard it."""

from __future__ import annotations

import random

import pytest

from decentral.errors import InviteError
from decentral.swarm.words import SpokenCode, known_words, looks_spoken, new_code, parse_code

CODE = SpokenCode(("acid", "cargo", "mural", "tulip"), 4711)


def test_a_code_is_read_as_it_was_said() -> None:
    rng = random.Random(0)
    for _ in range(200):
        code = new_code(rng.randrange)
        assert parse_code(str(code)) == code
        assert looks_spoken(str(code))


@pytest.mark.parametrize(
    "heard", ["Acid Cargo  MURAL tulip 4711", "acid-cargo-mural-tulip-4711", "acid, cargo, mural, tulip, 4711"]
)
def test_case_spaces_and_dashes_do_not_matter(heard: str) -> None:
    assert str(parse_code(heard)) == str(CODE) == "acid cargo mural tulip 4711"


@pytest.mark.parametrize(
    ("heard", "words"),
    [
        ("acid cargo mural 4711", "4 of 5"),
        ("acid cargo mural tulip tulip 4711", "6 of 5"),
        ("acid cargo mural tulip", "4 of 5"),
        ("acid cargo mural tulip 47", "'47' is no number from 1000"),
        ("acid cargo mural tulip \u0664\u0667\u0661\u0661", "is no number"),
        ("acid cargo murall tulip 4711", "perhaps mural"),
        ("acid cargo \x1b[2J tulip 4711", "is none of them"),
        ("acid " * 1000, "words"),
    ],
)
def test_what_is_no_code_is_one_line_and_no_try(heard: str, words: str) -> None:
    with pytest.raises(InviteError, match="words: ") as caught:
        parse_code(heard)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_an_invite_line_is_not_taken_for_words() -> None:
    assert not looks_spoken("decentral1:abc")
    assert not looks_spoken("decentral join decentral1:abc")
    assert not looks_spoken("word")


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
