"""The words of libp2p peers, byte by byte: numbers, names of protocols, fields, ids and addresses. No sockets."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import suppress
from typing import Protocol, TypeVar

from decentral.errors import PayloadError, PeerUnreachable
from decentral.wire.keys import PEER_NBYTES, PeerId, is_sound, peer_from_name, peer_name

# ---- numbers: unsigned varints ----
#
# As protobuf and multiaddrs use them: seven bits a byte, low first, high bit says more.

LONGEST_VARINT = 5  # bytes: 35 bits, more than any length here


def varint(number: int) -> bytes:
    """Return ``number`` in as few bytes as it takes."""
    packed = bytearray()
    while number >= 0x80:
        packed.append(number & 0x7F | 0x80)
        number >>= 7
    packed.append(number)
    return bytes(packed)


def read_varint(data: bytes, at: int = 0, longest: int = LONGEST_VARINT) -> tuple[int, int]:
    """Return the number that starts at ``at`` and where it ends.

    PayloadError when it does not end, or could be shorter.
    """
    number = 0
    for n, byte in enumerate(data[at : at + longest]):
        number |= (byte & 0x7F) << 7 * n
        if byte == 0 and n:
            raise PayloadError("varint: ends in a zero byte, so there is a shorter one; drop the message")
        if byte < 0x80:
            return number, at + n + 1
    raise PayloadError(f"varint: no end within {longest} bytes; drop the message")


# ---- the protocol of a stream ----
#
# Or of a connection: one side proposes by name, the other takes it or says ``na`` (multistream-select).
#
# Crosses the wire: each side's ``/multistream/1.0.0`` and the name, about 50 bytes each way; one round trip, unless
# what the stream is for goes along with the proposal.
#
# Source: multiformats/multistream-select, README.md.

_HEADER = "/multistream/1.0.0"
_REFUSED = "na"
_LONGEST_NAME = 256  # bytes; ours have fewer than 40
_MOST_PROPOSALS = 32  # proposals listened to


class Ends(Protocol):
    """A connection or a stream, as far as it is needed here."""

    async def send(self, data: bytes) -> None:
        """Send all of ``data``."""
        ...

    async def receive_exactly(self, nbytes: int, on_bytes: Callable[[int], None] | None = None) -> bytes:
        """Return the next ``nbytes``."""
        ...


async def propose(ends: Ends, protocol: str) -> None:
    """Have the other side speak ``protocol``. PeerUnreachable when it does not, PayloadError for nonsense."""
    await send_proposal(ends, protocol)
    await receive_agreement(ends, protocol)


async def send_proposal(ends: Ends, protocol: str) -> None:
    """Send the first half of ``propose``: to a side that has agreed before, what follows may go along with it."""
    await ends.send(_line(_HEADER) + _line(protocol))


async def receive_agreement(ends: Ends, protocol: str) -> None:
    """Receive the other half. Raises as ``propose`` does."""
    header = await _read_line(ends)
    answer = await _read_line(ends) if header == _HEADER else header
    if answer == _REFUSED and header == _HEADER:
        raise PeerUnreachable(f"{protocol} is not served there; compare the versions")
    if answer != protocol:
        raise PayloadError(f"multistream: {answer!a} in answer to {protocol}; drop the stream")


async def answer(ends: Ends, known: Container[str]) -> str:
    """Answer with the first protocol proposed that is ``known``, and return it. PayloadError when none of many is."""
    await ends.send(_line(_HEADER))
    if (header := await _read_line(ends)) != _HEADER:
        raise PayloadError(f"multistream: begins with {header!a}; drop the stream")
    for _ in range(_MOST_PROPOSALS):
        protocol = await _read_line(ends)
        if protocol in known:
            await ends.send(_line(protocol))
            return protocol
        await ends.send(_line(_REFUSED))
    raise PayloadError(f"multistream: {_MOST_PROPOSALS} proposals and none is served here; drop the stream")


def _line(text: str) -> bytes:
    return varint(len(text) + 1) + text.encode() + b"\n"


async def _read_line(ends: Ends) -> str:
    prefix = await ends.receive_exactly(1)
    if prefix[-1] >= 0x80:
        prefix += await ends.receive_exactly(1)
    nbytes, _ = read_varint(prefix) if prefix[-1] < 0x80 else (_LONGEST_NAME + 1, 0)
    if not 0 < nbytes <= _LONGEST_NAME:
        raise PayloadError(f"multistream: a name of {nbytes} bytes or more, at most {_LONGEST_NAME} are taken; drop it")
    line = await ends.receive_exactly(nbytes)
    return line.decode("utf-8", errors="replace").removesuffix("\n")


# ---- fields of messages: protobuf ----
#
# The little of it that libp2p's own messages need: numbered fields of bytes and of numbers.
#
# Bytes of strangers: nothing is copied before its length was found to fit, and a message has few fields.
#
# Source: protobuf.dev, "Encoding": a key is ``number << 3 | type``, type 0 a varint, type 2 bytes with their length.

_NUMBER, _BYTES = 0, 2
_LONGEST_NUMBER = 10  # bytes of 64 bits: a relay may grant a connection more than 32 GiB
_MOST_FIELDS = 64  # of our own messages; others say how many they take


def bytes_field(number: int, value: bytes) -> bytes:
    """Return a field that holds bytes, text or another message."""
    return varint(number << 3 | _BYTES) + varint(len(value)) + value


def number_field(number: int, value: int) -> bytes:
    """Return a field that holds a number."""
    return varint(number << 3 | _NUMBER) + varint(value)


def bytes_fields(message: bytes, most: int = _MOST_FIELDS) -> dict[int, list[bytes]]:
    """Return the fields that hold bytes, by number; numbers are passed over. PayloadError for what is no message."""
    found: dict[int, list[bytes]] = {}
    for number, value in _fields(message, most):
        if isinstance(value, bytes):
            found.setdefault(number, []).append(value)
    return found


def number_fields(message: bytes) -> dict[int, int]:
    """Return the fields that hold a number, the last one of each. PayloadError for what is no message."""
    return {number: value for number, value in _fields(message) if isinstance(value, int)}


def _fields(message: bytes, most: int = _MOST_FIELDS) -> Iterator[tuple[int, bytes | int]]:
    at = 0
    for _ in range(most):
        if at == len(message):
            return
        key, at = read_varint(message, at)
        value, at = read_varint(message, at, _LONGEST_NUMBER if key & 7 == _NUMBER else LONGEST_VARINT)
        if value >> 64:
            raise PayloadError(f"protobuf: field {key >> 3} has more than 64 bits; drop the message")
        if key & 7 == _NUMBER:
            yield key >> 3, value
            continue
        if key & 7 != _BYTES or at + value > len(message):
            raise PayloadError(f"protobuf: field {key >> 3} is cut short or of an unknown type; drop the message")
        yield key >> 3, message[at : at + value]
        at += value
    raise PayloadError(f"protobuf: more than {most} fields; drop the message")


# ---- ids of peers ----
#
# As bytes each is a multihash around the public key itself, because Ed25519 keys are short.
#
# Source: libp2p/specs, peer-ids/peer-ids.md.

ED25519 = bytes.fromhex("08011220")  # protobuf of a public key: type 1, 32 bytes
_ID_PREFIX = b"\x00\x24" + ED25519  # identity multihash of that


def peer_from_id(raw: bytes) -> PeerId:
    """Return the public key inside a libp2p id; PayloadError when it holds none or it is not Ed25519."""
    peer = bytes(raw[len(_ID_PREFIX) :])
    if not raw.startswith(_ID_PREFIX) or len(peer) != PEER_NBYTES or not is_sound(peer):
        raise PayloadError(f"libp2p id {raw[:40].hex()}: not an Ed25519 identity; only these take part")
    return peer


def peer_to_id(peer: PeerId) -> bytes:
    """Return the libp2p id of a public key, as bytes."""
    return _ID_PREFIX + peer


# ---- addresses: multiaddrs ----
#
# Between their text and the daemon's bytes: the protocols a libp2p peer is dialled by, no others.
#
# hivemind's own codec writes Ed25519 ids as CIDs, which the daemon refuses.
#
# Source: multiformats/multiaddr, protocols.csv and the README's binary layout.

LONGEST_MULTIADDR = 256  # characters

T = TypeVar("T")
U = TypeVar("U")

Codec = tuple[int, int | None, Callable[[str], bytes], Callable[[bytes], str]]  # code, bytes (None: prefixed)


def multiaddr_to_bytes(text: str) -> bytes:
    """Return the binary form. PayloadError for text that is no multiaddr of the known protocols."""
    if not text.startswith("/") or len(text) > LONGEST_MULTIADDR:
        raise _wrong(text[:60])
    parts, packed = iter(text[1:].split("/")), b""
    for name in parts:
        code, size, encode, _ = _codec(name)
        value = b"" if size == 0 else _encode(encode, next(parts, ""), name)
        packed += varint(code) + (varint(len(value)) if size is None else b"") + value
    return packed


def multiaddr_to_text(packed: bytes) -> str:
    """Return the text form. PayloadError for bytes that are no multiaddr of the known protocols."""
    text = "".join(f"/{name}" if value is None else f"/{name}/{value}" for name, value in _parts(packed))
    if not text:
        raise _wrong(text)
    return text


def convert_known(convert: Callable[[T], U], values: Iterable[T]) -> list[U]:
    """Return those of ``values`` that can be converted; strangers may have had a hand in any of them."""
    known = []
    for value in values:
        with suppress(PayloadError):
            known.append(convert(value))
    return known


def _parts(packed: bytes) -> Iterator[tuple[str, str | None]]:
    at = 0
    while at < len(packed):
        code, at = read_varint(packed, at)
        name = _NAMES.get(code, str(code))
        _, fixed, _, decode = _codec(name)
        size, at = read_varint(packed, at) if fixed is None else (fixed, at)
        value, at = packed[at : at + size], at + size
        if at > len(packed):
            raise _wrong(name)
        yield name, (None if fixed == 0 else _decode(decode, value, name))


def _codec(name: str) -> Codec:
    if name not in _CODECS:
        raise _wrong(name)
    return _CODECS[name]


def _encode(encode: Callable[[str], bytes], text: str, name: str) -> bytes:
    try:
        return encode(text)
    except (ValueError, OverflowError):
        raise _wrong(f"{name}/{text[:60]}") from None


def _decode(decode: Callable[[bytes], str], value: bytes, name: str) -> str:
    try:
        return decode(value)
    except ValueError:
        raise _wrong(name) from None


def _wrong(part: str) -> PayloadError:
    return PayloadError(f"multiaddr: {part!a} is malformed or not a way to reach a peer; drop the address")


def _port(text: str) -> bytes:
    return int(text).to_bytes(2, "big")


def _host_name(text: str) -> bytes:
    if not text or not all("!" <= c <= "~" and c != "/" for c in text):  # a slash would begin another protocol
        raise ValueError("no host name")
    return text.encode("ascii")


def _host_text(value: bytes) -> str:
    text = value.decode("latin-1")
    _host_name(text)
    return text


def _peer(value: bytes) -> str:
    if len(value) != len(_ID_PREFIX) + 32 or not value.startswith(_ID_PREFIX):
        raise ValueError("not an Ed25519 id")
    return peer_name(value[len(_ID_PREFIX) :])


def _nothing(text: str) -> bytes:
    return b""


def _flag(code: int) -> Codec:
    return code, 0, _nothing, bytes.hex


def _name(code: int) -> Codec:
    return code, None, _host_name, _host_text


_CODECS: dict[str, Codec] = {
    "ip4": (4, 4, lambda text: ipaddress.IPv4Address(text).packed, lambda v: str(ipaddress.IPv4Address(v))),
    "ip6": (41, 16, lambda text: ipaddress.IPv6Address(text).packed, lambda v: str(ipaddress.IPv6Address(v))),
    "tcp": (6, 2, _port, lambda value: str(int.from_bytes(value, "big"))),
    "udp": (273, 2, _port, lambda value: str(int.from_bytes(value, "big"))),
    "dns": _name(53),
    "dns4": _name(54),
    "dns6": _name(55),
    "dnsaddr": _name(56),
    "p2p": (421, None, lambda text: _ID_PREFIX + peer_from_name(text), _peer),
    "p2p-circuit": _flag(290),
    "quic": _flag(460),
    "quic-v1": _flag(461),
    "ws": _flag(477),
    "wss": _flag(478),
}
_NAMES = {codec[0]: name for name, codec in _CODECS.items()}
