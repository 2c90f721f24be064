"""One declaration per message: the annotations of a frozen dataclass are its byte layout, field after
field.

No names and no lengths of fields cross the wire. Rules that concern several fields live in the
dataclass's method ``check() -> str | None``, asked after reading and before writing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, Generic, TypeVar, get_type_hints

from decentral.errors import PayloadError
from decentral.wire.codecs import FieldCodec, Reader

T = TypeVar("T")


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
        _check(value, lambda what: PayloadError(f"{self._name}: {what}; nothing was sent"))
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
        _check(value, reader.bad)
        return value


def layout_of(make: type[T]) -> Struct[T]:
    """The layout that a dataclass declares; made once."""
    layout: Struct[T] | None = _LAYOUTS.get(make)
    if layout is None:
        layout = _LAYOUTS[make] = Struct(make)
    return layout


_LAYOUTS: dict[type, Struct[Any]] = {}  # Any: every T


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


def _check(value: object, bad: Callable[[str], PayloadError]) -> None:
    rule = getattr(value, "check", None)
    broken = rule() if rule is not None else None
    if broken:
        raise bad(broken)
