"""Four words and a number: the number says where two people meet, the words that they are those two.

The number is public: a transport's key follows from it, so whoever knows the number can find the one who invites, in
the local network or at a relay, and can also pretend to be it. The words never cross the wire. Each is one of 1,295,
so a guess is right once in 2.8e12.
"""

from __future__ import annotations

import difflib
import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from decentral.errors import InviteError
from decentral.wire.keys import PeerId, Signer

WORDS = 4
SMALLEST, LARGEST = 1000, 9999  # numbers
_LONGEST = 80  # characters of what is taken for a code: four words have 23 at most
_HINT = "it is four words and a number, as decentral invite --words prints them"

Below = Callable[[int], int]  # a random number from 0 up to, not including, this one


@dataclass(frozen=True, slots=True)
class SpokenCode:
    """``str(code)`` is what is said, ``parse`` its inverse."""

    words: tuple[str, ...]
    number: int

    def __str__(self) -> str:
        return f"{' '.join(self.words)} {self.number}"

    @property
    def password(self) -> bytes:
        """What both sides know, and nobody is told."""
        return str(self).encode("ascii")

    @property
    def topic(self) -> bytes:
        """32 bytes that stand for the number alone."""
        return hashlib.blake2b(str(self.number).encode("ascii"), digest_size=32, person=b"decentral words").digest()

    @property
    def signer(self) -> Signer:
        """The key of whoever invites at this number. It is no secret: it is an address."""
        return Signer(self.topic)

    @property
    def host(self) -> PeerId:
        """Who invites at this number, or pretends to."""
        return self.signer.peer


def new_code(below: Below = secrets.randbelow) -> SpokenCode:
    """A fresh one."""
    known = known_words()
    return SpokenCode(tuple(known[below(len(known))] for _ in range(WORDS)), SMALLEST + below(LARGEST - SMALLEST + 1))


def looks_spoken(text: str) -> bool:
    """Whether somebody means words, rightly spelled or not, and no invite line."""
    return ":" not in text and len(text.split()) > 1


def parse_code(text: str) -> SpokenCode:
    """The code of what somebody heard: in any case, with any spaces or dashes. Raises InviteError, in one line.

    A word that is not in the list is told here, with the nearest that is, and costs no try.
    """
    parts = text[:_LONGEST].lower().replace("-", " ").replace(",", " ").split()
    if len(text) > _LONGEST or len(parts) != WORDS + 1:
        raise InviteError(f"words: {len(parts)} of {WORDS + 1}; {_HINT}")
    *words, number = parts
    if not (number.isascii() and number.isdecimal() and SMALLEST <= int(number) <= LARGEST):
        raise InviteError(f"words: {number!a} is no number from {SMALLEST} to {LARGEST}; {_HINT}")
    for word in words:
        if word not in known_words():
            raise InviteError(f"words: {word!a} is none of them{_nearest(word)}; ask again, nothing was tried")
    return SpokenCode(tuple(words), int(number))


@cache
def known_words() -> tuple[str, ...]:
    """1,295 short words: the one with a dash is left out."""
    text = files(__package__).joinpath("eff_short.txt").read_text(encoding="ascii")
    return tuple(word for word in text.split() if word.isalpha())


def _nearest(word: str) -> str:
    found = difflib.get_close_matches(word, known_words(), n=1)
    return f", perhaps {found[0]}" if found else ""
