"""Columns of numbers of bounded length: a run of months has as many points on the screen as one of an hour."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LIMIT = 800  # points: more than a chart has pixels to tell apart on a phone, about as many as on a desk


class Series:
    """Rows by ascending ``key``. When there are too many, every second one is dropped, and then only every second one
    is taken. The newest is always there.
    """

    def __init__(self, key: str, columns: tuple[str, ...], limit: int = LIMIT) -> None:
        self._key, self._columns, self._limit = key, columns, limit
        self._rows: list[tuple[Any, ...]] = []  # of strings and numbers as the file has them
        self._newest: tuple[Any, ...] | None = None
        self._stride, self._seen = 1, 0

    def add(self, row: Mapping[str, Any]) -> None:
        """One more row. One at or before the last takes the place of all that it repeats, as after a restart."""
        if not isinstance(row.get(self._key), int | float):
            return
        taken = tuple(row.get(column) for column in self._columns)
        at = self._columns.index(self._key)
        if self._newest is not None and self._newest[at] >= taken[at]:
            self._rows = [kept for kept in self._rows if kept[at] < taken[at]]
        self._newest = taken
        if self._seen % self._stride == 0:
            self._rows.append(taken)
        self._seen += 1
        if len(self._rows) > self._limit:
            self._rows = self._rows[::2]
            self._stride *= 2

    def columns(self) -> dict[str, list[Any]]:
        """By name, from the oldest to the newest."""
        rows = [*self._rows]
        if self._newest is not None and (not rows or rows[-1] != self._newest):
            rows.append(self._newest)
        return {name: [row[at] for row in rows] for at, name in enumerate(self._columns)}
