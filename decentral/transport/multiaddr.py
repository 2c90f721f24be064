"""Multiaddrs between their text and the daemon's bytes: the protocols a libp2p peer is dialled by, no others.

hivemind's own codec writes Ed25519 ids as CIDs, which the daemon refuses.

Source: multiformats/multiaddr, protocols.csv and the README's binary layout.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator

from decentral.errors import PayloadError
from decentral.transport.protocols.messages import read_varint, varint
from decentral.wire.keys import peer_from_name, peer_name

LONGEST = 256  # characters
_ID_PREFIX = bytes.fromhex("002408011220")  # identity multihash of an Ed25519 key's protobuf

Codec = tuple[int, int | None, Callable[[str], bytes], Callable[[bytes], str]]  # code, bytes (None: prefixed)


def to_bytes(text: str) -> bytes:
    """The binary form. PayloadError for text that is no multiaddr of the known protocols."""
    if not text.startswith("/") or len(text) > LONGEST:
        raise _wrong(text[:60])
    parts, packed = iter(text[1:].split("/")), b""
    for name in parts:
        code, size, encode, _ = _codec(name)
        value = b"" if size == 0 else _encoded(encode, next(parts, ""), name)
        packed += varint(code) + (varint(len(value)) if size is None else b"") + value
    return packed


def to_text(packed: bytes) -> str:
    """The text form. PayloadError for bytes that are no multiaddr of the known protocols."""
    text = "".join(f"/{name}" if value is None else f"/{name}/{value}" for name, value in _parts(packed))
    if not text:
        raise _wrong(text)
    return text


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
        yield name, (None if fixed == 0 else _decoded(decode, value, name))


def _codec(name: str) -> Codec:
    if name not in _CODECS:
        raise _wrong(name)
    return _CODECS[name]


def _encoded(encode: Callable[[str], bytes], text: str, name: str) -> bytes:
    try:
        return encode(text)
    except (ValueError, OverflowError):
        raise _wrong(f"{name}/{text[:60]}") from None


def _decoded(decode: Callable[[bytes], str], value: bytes, name: str) -> str:
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
