"""An invite: one line that says which run it is, whom to ask first and, where the run wants one, a token.

``decentral1:`` and base64url of length u16, run 32, addresses, token, checksum 4 (blake2b). The length tells a line
that was cut from one that was altered. No secret is in it unless there is a token.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from decentral.errors import DiskError, InviteError, PayloadError, UsageError
from decentral.wire.codecs import Hash, Many, Maybe, Text, from_bytes, to_bytes
from decentral.wire.messages import ADDRESS

PREFIX = "decentral1:"
MAX_ADDRESSES = 8
MAX_TOKEN = 128  # characters

_HEAD = struct.Struct("<H")
_CHECKSUM_NBYTES = 4
_MAX_CHARACTERS = 4096  # eight of the longest addresses and a token take 3,000


@dataclass(frozen=True, slots=True)
class Invite:
    """Which run, and the way in. ``str(invite)`` is the line, ``Invite.parse`` its inverse."""

    run: Hash  # digest of the manifest
    addresses: Annotated[tuple[str, ...], Many(ADDRESS, MAX_ADDRESSES)]  # multiaddrs ending in /p2p/<name>
    token: Annotated[str | None, Maybe(Text(MAX_TOKEN))] = field(default=None, repr=False)  # a log holds no secret

    def __post_init__(self) -> None:
        try:
            to_bytes(self)
        except PayloadError as error:
            raise InviteError(f"invite: {error}") from error

    def check(self) -> str | None:
        """The rule across fields that this invite breaks."""
        strange = [address for address in self.addresses if not address.startswith("/")]
        return f"address {strange[0]} does not begin with /" if strange else None

    def __str__(self) -> str:
        body = to_bytes(self)
        data = _HEAD.pack(len(body)) + body
        return PREFIX + base64.urlsafe_b64encode(data + _checksum(data)).decode("ascii").rstrip("=")

    @classmethod
    def parse(cls, text: str) -> Invite:
        """The invite of a line; spaces and line breaks in it do not matter. Raises InviteError, in one line."""
        if not isinstance(text, str):
            raise InviteError(f"invite: a {type(text).__name__} is none; give the line that begins with {PREFIX}")
        if len(text) > 2 * _MAX_CHARACTERS:
            raise InviteError(f"invite: {len(text)} characters are too many; copy the one line only")
        text = text.removeprefix("decentral join ").partition(" --data ")[0]  # the whole line of a peer will do
        text = "".join(text.split())
        if not text.startswith(PREFIX):
            raise InviteError(f"invite: {_kind(text)}; an invite begins with {PREFIX}")
        body = _unpack(text.removeprefix(PREFIX))
        try:
            invite = from_bytes(cls, body)
        except PayloadError as error:
            raise InviteError(f"invite: made wrongly ({error}); ask for a new one") from error
        if str(invite) != text:  # the last character has bits to spare
            raise InviteError("invite: altered on the way; copy it again or ask for a new one")
        return invite


# ---- the token of a run folder ----
#
# It lies in a file of its own, which its owner alone reads; whatever else is written there has invites without it.

TOKEN_FILE = "admission.token"


def load_token(out: Path, given: str | None) -> str | None:
    """The admission token of the run in ``out``, or the one ``given``. UsageError when there are two."""
    path = out / TOKEN_FILE
    try:
        kept = path.read_text(encoding="ascii").strip()
    except (FileNotFoundError, NotADirectoryError):
        return given
    except (OSError, ValueError) as error:
        raise DiskError(f"{path}: cannot be read ({error}); put it back, the invite has the same token") from error
    if given not in (None, kept):
        raise UsageError(f"{path} holds another admission token; leave it out, or ask for an invite of today")
    return kept


def whole_invite(invite: str, out: Path, given: str | None = None) -> str:
    """The invite with the run's token, where it has none, and one is ``given`` or lies in ``out``.

    What a peer writes about itself has no token in it. UsageError when there are two tokens; InviteError, DiskError.
    """
    token = load_token(out, given)
    if token is None or not invite:
        return invite
    found = Invite.parse(invite)
    if found.token not in (None, token):
        raise UsageError(f"the invite has another token than {out} or --admit; ask for an invite of today")
    return str(replace(found, token=token))


# ---- whom an invite reaches ----
#
# By its addresses alone: whether a port is open, nobody can say from here.


def reach(addresses: Sequence[str]) -> str:
    """Say for people whom a peer at these multiaddrs can be dialled by."""
    direct = {_host(one): _scope(_host(one)) for one in addresses if "/p2p-circuit" not in one}
    through = {_place(one): _scope(_host(one)) for one in addresses if "/p2p-circuit" in one}
    for scope, whom in ((2, "anybody"), (1, "this network only"), (0, "this machine only")):
        if relays := [place for place, its in through.items() if its == scope]:
            return f"{whom}, through the relay {relays[0]}"
        if hosts := [host for host, its in direct.items() if its == scope]:
            return f"anybody, at {hosts[0]} (if its port is open)" if scope == 2 else f"{whom} ({hosts[0]})"
    return "nobody yet"


def _scope(host: str) -> int:
    """Return 0 of a host that this machine alone reaches, 1 of one on its network, 2 of a public one or a name."""
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return 2
    return 0 if found.is_loopback else 2 if found.is_global else 1


def _host(address: str) -> str:
    return address.split("/")[2] if address.count("/") > 1 else ""


def _place(address: str) -> str:
    parts = address.split("/")
    return f"{parts[2]}:{parts[4]}" if len(parts) > 4 else address


def _kind(text: str) -> str:
    if not text:
        return "empty"
    if text.startswith("decentral") and ":" in text[:12]:
        return "made by another version of this program, install theirs"
    shown = text[:20] if text.isascii() and text.isprintable() else ascii(text[:10])
    return f"{shown} is not an invite"


def _unpack(text: str) -> bytes:
    """The body, its length and checksum found right."""
    text = text[:-1] if len(text) % 4 == 1 else text  # cut inside a group: the length below says so
    try:
        data = base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except ValueError:
        raise InviteError("invite: has characters that do not belong; copy the whole line again") from None
    if len(data) < _HEAD.size:
        raise InviteError("invite: cut short; copy the whole line again")
    want = _HEAD.size + _HEAD.unpack_from(data)[0] + _CHECKSUM_NBYTES
    if len(data) < want:
        raise InviteError(f"invite: cut short, {len(data)} of {want} bytes; copy the whole line again")
    if len(data) > want:
        raise InviteError("invite: something follows its end; copy the one line only")
    body, checksum = data[:-_CHECKSUM_NBYTES], data[-_CHECKSUM_NBYTES:]
    if checksum != _checksum(body):
        raise InviteError("invite: altered on the way, its checksum is wrong; copy it again or ask for a new one")
    return body[_HEAD.size :]


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_CHECKSUM_NBYTES).digest()
