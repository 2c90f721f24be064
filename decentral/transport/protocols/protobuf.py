"""The little of protobuf that libp2p's own messages need: numbered fields of bytes and of numbers.

Bytes of strangers: nothing is copied before its length was found to fit, and a message has few fields.

Source: protobuf.dev, "Encoding": a key is ``number << 3 | type``, type 0 a varint, type 2 bytes with their length.
"""

from __future__ import annotations

from collections.abc import Iterator

from decentral.errors import PayloadError
from decentral.transport.protocols.varint import LONGEST, read_varint, varint

_NUMBER, _BYTES = 0, 2
_LONGEST_NUMBER = 10  # bytes of 64 bits: a relay may grant a connection more than 32 GiB
_MOST_FIELDS = 64  # of our own messages; others say how many they take


def bytes_field(number: int, value: bytes) -> bytes:
    """One field that holds bytes, text or another message."""
    return varint(number << 3 | _BYTES) + varint(len(value)) + value


def number_field(number: int, value: int) -> bytes:
    """One field that holds a number."""
    return varint(number << 3 | _NUMBER) + varint(value)


def bytes_fields(message: bytes, most: int = _MOST_FIELDS) -> dict[int, list[bytes]]:
    """The fields that hold bytes, by number; numbers are passed over. PayloadError for what is no message."""
    found: dict[int, list[bytes]] = {}
    for number, value in _fields(message, most):
        if isinstance(value, bytes):
            found.setdefault(number, []).append(value)
    return found


def number_fields(message: bytes) -> dict[int, int]:
    """The fields that hold a number, the last one of each. PayloadError for what is no message."""
    return {number: value for number, value in _fields(message) if isinstance(value, int)}


def _fields(message: bytes, most: int = _MOST_FIELDS) -> Iterator[tuple[int, bytes | int]]:
    at = 0
    for _ in range(most):
        if at == len(message):
            return
        key, at = read_varint(message, at)
        value, at = read_varint(message, at, _LONGEST_NUMBER if key & 7 == _NUMBER else LONGEST)
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
