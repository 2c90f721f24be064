"""The little of protobuf that libp2p's own messages need: numbered fields of bytes and of numbers.

Bytes of strangers: nothing is copied before its length was found to fit, and a message has few fields.

Source: protobuf.dev, "Encoding": a key is ``number << 3 | type``, type 0 a varint, type 2 bytes with their length.
"""

from __future__ import annotations

from decentral.errors import PayloadError
from decentral.transport.varint import read_varint, varint

_NUMBER, _BYTES = 0, 2
_MOST_FIELDS = 64


def bytes_field(number: int, value: bytes) -> bytes:
    """One field that holds bytes, text or another message."""
    return varint(number << 3 | _BYTES) + varint(len(value)) + value


def bytes_fields(message: bytes) -> dict[int, list[bytes]]:
    """The fields that hold bytes, by number; numbers are passed over. PayloadError for what is no message."""
    found: dict[int, list[bytes]] = {}
    at = 0
    for _ in range(_MOST_FIELDS):
        if at == len(message):
            return found
        key, at = read_varint(message, at)
        if key & 7 == _NUMBER:
            _, at = read_varint(message, at)
            continue
        nbytes, at = read_varint(message, at)
        if key & 7 != _BYTES or at + nbytes > len(message):
            raise PayloadError(f"protobuf: field {key >> 3} is cut short or of an unknown type; drop the message")
        found.setdefault(key >> 3, []).append(message[at : at + nbytes])
        at += nbytes
    raise PayloadError(f"protobuf: more than {_MOST_FIELDS} fields; drop the message")
