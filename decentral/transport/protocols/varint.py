"""Unsigned varints, as protobuf and multiaddrs use them: seven bits a byte, low first, high bit says more."""

from __future__ import annotations

from decentral.errors import PayloadError

LONGEST = 5  # bytes: 35 bits, more than any length here


def varint(number: int) -> bytes:
    """``number`` in as few bytes as it takes."""
    packed = bytearray()
    while number >= 0x80:
        packed.append(number & 0x7F | 0x80)
        number >>= 7
    packed.append(number)
    return bytes(packed)


def read_varint(data: bytes, at: int = 0, longest: int = LONGEST) -> tuple[int, int]:
    """The number that starts at ``at`` and where it ends. PayloadError when it does not end, or could be shorter."""
    number = 0
    for n, byte in enumerate(data[at : at + longest]):
        number |= (byte & 0x7F) << 7 * n
        if byte == 0 and n:
            raise PayloadError("varint: ends in a zero byte, so there is a shorter one; drop the message")
        if byte < 0x80:
            return number, at + n + 1
    raise PayloadError(f"varint: no end within {longest} bytes; drop the message")
