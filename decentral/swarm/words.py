"""Four words and a number: the number says where two people meet, the words that they are those two. The code itself,
and the handshake by which both sides find out that they know the same words.

The number is public: a transport's key follows from it, so whoever knows the number can find the one who invites, in
the local network or at a relay, and can also pretend to be it. The words never cross the wire. Each is one of 1,295,
so a guess is right once in 2.8e12.
"""

from __future__ import annotations

import difflib
import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from decentral.errors import InviteError, PayloadError
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
        """The secret that both sides know, and nobody is told."""
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
        """The peer that invites at this number, or pretends to."""
        return self.signer.peer


def new_code(below: Below = secrets.randbelow) -> SpokenCode:
    """Return a fresh code."""
    known = known_words()
    return SpokenCode(tuple(known[below(len(known))] for _ in range(WORDS)), SMALLEST + below(LARGEST - SMALLEST + 1))


def looks_spoken(text: str) -> bool:
    """Tell whether somebody means words, rightly spelled or not, and no invite line."""
    return ":" not in text and len(text.split()) > 1


def parse_code(text: str) -> SpokenCode:
    """Return the code that somebody heard: in any case, with any spaces or dashes. Raises InviteError, in one line.

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


# ---- the handshake ----
#
# Nobody learns the words or the invite from watching it.
#
# Crosses the wire: 33 bytes from the guest, 33 from the host, 32 from the guest (its proof), then the invite, sealed.
# The guest proves itself first: the host gives nothing to who has not. Each side may test one guess of the words per
# handshake, and neither side's messages let anybody test guesses afterwards. What is agreed is bound to both sides'
# transport keys, so a third one that passes messages on gets nowhere, and a message sent back to its sender is refused.
#
# Not defended against: an observer of how long a Python program computes. The words are used once, for ten minutes.
#
# Source: Abdalla and Pointcheval, "Simple Password-Based Encrypted Key Exchange Protocols", 2005, as the package spake2
# (Brian Warner, MIT) has it over Ed25519; key confirmation as in RFC 9382, 3.3.

ELEMENT_NBYTES = 33  # one for the side, a point of 32
PROOF_NBYTES = 32
TAG_NBYTES = 16
MAX_SEALED = 4096 + TAG_NBYTES  # of the longest invite
_ONCE = bytes(12)  # the nonce: each key seals one message


class WordsHandshake:
    """A side of one handshake; ``first`` is what it sends first, to be sent once."""

    def __init__(self, password: bytes, guest: PeerId, host: PeerId, *, is_guest: bool) -> None:
        import spake2  # here: tables of points are worked out on import, which only this needs

        side: Any = spake2.SPAKE2_A if is_guest else spake2.SPAKE2_B  # Any: the package has no types
        self._side = side(password, idA=guest, idB=host)
        self._is_guest = is_guest
        self.first: bytes = self._side.start()
        self._key = b""

    def hear(self, element: bytes) -> None:
        """Take the other side's first message. Raises PayloadError for one that is none, or our own."""
        if len(element) != ELEMENT_NBYTES:
            raise _none(f"a first message of {len(element)} bytes, want {ELEMENT_NBYTES}")
        try:
            shared = self._side.finish(element)
        except Exception as error:  # noqa: BLE001  the package refuses by several kinds, assertions among them
            raise _none(f"a first message that is none ({type(error).__name__})") from None
        sent = (self.first, element) if self._is_guest else (element, self.first)
        self._key = hashlib.blake2b(b"".join(sent), digest_size=32, key=shared, person=b"decentral words").digest()

    def proof(self) -> bytes:
        """Return the guest's proof that it knows the words."""
        return self._derive(b"guest's proof")

    def takes(self, proof: bytes) -> bool:
        """Tell whether it is the guest's proof."""
        return hmac.compare_digest(proof, self.proof())

    def seal(self, text: bytes) -> bytes:
        """Seal a text for the other side alone, once."""
        return ChaCha20Poly1305(self._derive(b"host's invite")).encrypt(_ONCE, text, None)

    def open(self, sealed: bytes) -> bytes:
        """Return what the host sealed. Raises PayloadError when it did not know the words."""
        try:
            return ChaCha20Poly1305(self._derive(b"host's invite")).decrypt(_ONCE, sealed, None)
        except InvalidTag:
            raise PayloadError("words: whoever answered does not know them; drop it") from None

    def _derive(self, purpose: bytes) -> bytes:
        assert self._key, "heard before it is used"
        return hashlib.blake2b(purpose, digest_size=PROOF_NBYTES, key=self._key).digest()


def _none(why: str) -> PayloadError:
    return PayloadError(f"words: {why}; drop its sender")
