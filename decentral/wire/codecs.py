"""Codecs of messages: how single values are written, and how the annotations of a dataclass make up a layout.

Little-endian, no padding, no names on the wire. Both directions apply the same rules: what cannot be read cannot be
written either. The only exception is PayloadError.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Annotated, Any, Generic, Protocol, TypeVar, get_type_hints

from decentral.errors import PayloadError
from decentral.wire.keys import DIGEST_NBYTES, PEER_NBYTES, SIGNATURE_NBYTES, Digest, PeerId

# ---- single values and lists ----
#
# Integers, keys, flags, text, lists with a bounded count: every list is counted and its count bounded before anything
# is read; lists that are sets are sorted, so every value has exactly one encoding.

T = TypeVar("T")


class Reader:
    """Bytes of a peer, taken from the front; ``place`` names what is being read, for the error."""

    __slots__ = ("_data", "_offset", "place")

    def __init__(self, data: bytes, place: str = "message") -> None:
        self._data = data
        self._offset = 0
        self.place = place

    def take(self, nbytes: int) -> bytes:
        """The next ``nbytes`` bytes."""
        left = len(self._data) - self._offset
        if nbytes > left:
            raise self.bad(f"cut short: {nbytes} bytes wanted, {left} left")
        self._offset += nbytes
        return self._data[self._offset - nbytes : self._offset]

    def finish(self) -> None:
        """Refuse anything after the end."""
        left = len(self._data) - self._offset
        if left:
            raise PayloadError(f"{self.place.split('.')[0]} has {left} bytes after its end; drop it and its sender")

    def bad(self, what: str) -> PayloadError:
        """The error for the value being read."""
        return PayloadError(f"{self.place}: {what}; drop it and its sender")


class FieldCodec(Protocol[T]):
    """A kind of value, both ways. Raises PayloadError for a value that breaks its rule."""

    def write(self, value: T, out: bytearray) -> None:
        """Append the value's one encoding."""

    def read(self, reader: Reader) -> T:
        """Take one value."""


@dataclass(frozen=True, slots=True)
class Integer:
    """A fixed-width integer, spelled as ``struct`` does."""

    code: str

    def write(self, value: int, out: bytearray) -> None:
        """Append it."""
        try:
            out += struct.pack("<" + self.code, value)
        except struct.error as error:
            raise PayloadError(f"{value!r} does not fit its field: {error}; nothing was sent") from error

    def read(self, reader: Reader) -> int:
        """Take it."""
        code = "<" + self.code
        return int(struct.unpack(code, reader.take(struct.calcsize(code)))[0])


@dataclass(frozen=True, slots=True)
class Fixed:
    """Exactly ``nbytes`` bytes."""

    nbytes: int

    def write(self, value: bytes, out: bytearray) -> None:
        """Append them."""
        if len(value) != self.nbytes:
            raise PayloadError(f"{len(value)} bytes where {self.nbytes} belong; nothing was sent")
        out += value

    def read(self, reader: Reader) -> bytes:
        """Take them."""
        return reader.take(self.nbytes)


@dataclass(frozen=True, slots=True)
class Bounded:
    """At most ``limit`` bytes, itself at most 255: a length byte, then the bytes."""

    limit: int

    def write(self, value: bytes, out: bytearray) -> None:
        """Append their number and them."""
        if len(value) > self.limit:
            raise PayloadError(f"{len(value)} bytes, at most {self.limit}; nothing was sent")
        out.append(len(value))
        out += value

    def read(self, reader: Reader) -> bytes:
        """Take the number, check it, take the bytes."""
        nbytes = reader.take(1)[0]
        if nbytes > self.limit:
            raise reader.bad(f"{nbytes} bytes, at most {self.limit}")
        return reader.take(nbytes)


@dataclass(frozen=True, slots=True)
class Boolean:
    """A byte, 0 or 1."""

    def write(self, value: bool, out: bytearray) -> None:
        """Append it."""
        out.append(1 if value else 0)

    def read(self, reader: Reader) -> bool:
        """Take it."""
        byte = reader.take(1)[0]
        if byte > 1:
            raise reader.bad(f"flag byte {byte}, want 0 or 1")
        return byte == 1


@dataclass(frozen=True, slots=True)
class Text:
    """Printable ASCII without spaces, at most ``limit`` characters: safe on a terminal and in a log."""

    limit: int

    def write(self, value: str, out: bytearray) -> None:
        """Append its length and itself."""
        if len(value) > self.limit or not _printable(value):
            shown = ascii(value[:40])
            raise PayloadError(f"text {shown} is not at most {self.limit} visible ASCII characters; nothing was sent")
        out += struct.pack("<H", len(value)) + value.encode("ascii")

    def read(self, reader: Reader) -> str:
        """Take it."""
        length = U16_CODEC.read(reader)
        if length > self.limit:
            raise reader.bad(f"text of {length} characters, at most {self.limit}")
        value = reader.take(length).decode("latin-1")
        if not _printable(value):
            raise reader.bad("text with other than visible ASCII characters")
        return value


@dataclass(frozen=True, slots=True)
class Row:
    """A plain tuple of the given kinds."""

    kinds: tuple[FieldCodec[Any], ...]  # Any: each place has its own type

    def write(self, value: tuple[Any, ...], out: bytearray) -> None:  # Any: as above
        """Append each."""
        for kind, item in zip(self.kinds, value, strict=True):
            kind.write(item, out)

    def read(self, reader: Reader) -> tuple[Any, ...]:  # Any: as above
        """Take each."""
        return tuple(kind.read(reader) for kind in self.kinds)


@dataclass(frozen=True, slots=True)
class Many(Generic[T]):
    """At most ``limit`` items; with ``key``, strictly rising in it, so that a set has one spelling."""

    item: FieldCodec[T]
    limit: int
    key: Callable[[T], Any] | None = None  # Any: something that can be ordered

    def write(self, value: tuple[T, ...], out: bytearray) -> None:
        """Append the count and the items."""
        self._check(value, lambda what: PayloadError(f"{what}; nothing was sent"))
        out += struct.pack("<I", len(value))
        for item in value:
            self.item.write(item, out)

    def read(self, reader: Reader) -> tuple[T, ...]:
        """Take the count, check it, take the items."""
        count = U32_CODEC.read(reader)
        if count > self.limit:
            raise reader.bad(f"{count} items, at most {self.limit}")
        value = tuple(self.item.read(reader) for _ in range(count))
        self._check(value, reader.bad)
        return value

    def _check(self, value: tuple[T, ...], bad: Callable[[str], PayloadError]) -> None:
        if len(value) > self.limit:
            raise bad(f"{len(value)} items, at most {self.limit}")
        if self.key is not None:
            keys = [self.key(item) for item in value]
            if any(not a < b for a, b in pairwise(keys)):
                raise bad("items are not sorted, or one is there twice")


@dataclass(frozen=True, slots=True)
class Maybe(Generic[T]):
    """Nothing or one item."""

    item: FieldCodec[T]

    def write(self, value: T | None, out: bytearray) -> None:
        """Append the flag and the item."""
        out.append(0 if value is None else 1)
        if value is not None:
            self.item.write(value, out)

    def read(self, reader: Reader) -> T | None:
        """Take it."""
        return self.item.read(reader) if Boolean().read(reader) else None


def _printable(value: str) -> bool:
    return value.isascii() and value.isprintable() and " " not in value


U16_CODEC, U32_CODEC, U64_CODEC = Integer("H"), Integer("I"), Integer("Q")
PEER_CODEC, SIGNATURE_CODEC = Fixed(PEER_NBYTES), Fixed(SIGNATURE_NBYTES)

U8 = Annotated[int, Integer("B")]
U16 = Annotated[int, U16_CODEC]
U32 = Annotated[int, U32_CODEC]
U64 = Annotated[int, U64_CODEC]
I32 = Annotated[int, Integer("i")]
Flag = Annotated[bool, Boolean()]
Peer = Annotated[PeerId, PEER_CODEC]
Hash = Annotated[Digest, Fixed(DIGEST_NBYTES)]
Signature = Annotated[bytes, SIGNATURE_CODEC]

# ---- the layout of a dataclass ----
#
# A message is declared once: the annotations of a frozen dataclass are its byte layout, field after field, and no
# lengths of fields cross the wire. Rules that concern several fields live in the dataclass's method ``check() -> str |
# None``, asked after reading and before writing.


class Struct(Generic[T]):
    """A dataclass whose fields carry a codec each; its method ``check`` states rules across fields."""

    def __init__(self, make: Callable[..., T]) -> None:
        hints = get_type_hints(make, include_extras=True)
        names = [field.name for field in fields(make)]  # type: ignore[arg-type]  # a dataclass
        self._make = make
        self._name = make.__name__
        self._fields: list[tuple[str, FieldCodec[Any]]] = [(name, hints[name].__metadata__[0]) for name in names]

    def write(self, value: T, out: bytearray) -> None:
        """Append the fields in order."""
        _check_rule(value, lambda what: PayloadError(f"{self._name}: {what}; nothing was sent"))
        out += self.fields_to_bytes(value)

    def fields_to_bytes(self, value: T) -> bytes:
        """The encoding before ``check`` is asked: for a signature over the other fields."""
        out = bytearray()
        for name, codec in self._fields:
            try:
                codec.write(getattr(value, name), out)
            except PayloadError as error:
                raise PayloadError(f"{self._name}.{name}: {error}") from error
        return bytes(out)

    def read(self, reader: Reader) -> T:
        """Take the fields in order."""
        values: dict[str, object] = {}
        for name, codec in self._fields:
            reader.place = f"{self._name}.{name}"
            values[name] = codec.read(reader)
        reader.place = self._name
        value = self._make(**values)
        _check_rule(value, reader.bad)
        return value


_LAYOUTS: dict[type, Struct[Any]] = {}  # Any: every T


def layout_of(make: type[T]) -> Struct[T]:
    """The layout that a dataclass declares; made once."""
    layout: Struct[T] | None = _LAYOUTS.get(make)
    if layout is None:
        layout = _LAYOUTS[make] = Struct(make)
    return layout


def to_bytes(value: object) -> bytes:
    """The encoding of a dataclass with a layout. Raises PayloadError for a value that breaks a rule."""
    out = bytearray()
    layout_of(type(value)).write(value, out)
    return bytes(out)


def from_bytes(make: type[T], data: bytes) -> T:
    """The value encoded by exactly ``data``. Raises PayloadError, and nothing else."""
    reader = Reader(bytes(data), make.__name__)
    value = layout_of(make).read(reader)
    reader.place = make.__name__
    reader.finish()
    return value


def _check_rule(value: object, bad: Callable[[str], PayloadError]) -> None:
    rule = getattr(value, "check", None)
    broken = rule() if rule is not None else None
    if broken:
        raise bad(broken)
