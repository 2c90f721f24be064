from collections.abc import Iterator
from pathlib import Path
from typing import Any

from decentral.observe.events import EVENTS_FILE, EventLog, follow_events
from decentral.observe.lines import pack_put_aside, put_aside


class Nothing(Exception):
    pass


def follow(directory: Path, *, last: int = 20, event: str | None = None) -> tuple[Iterator[dict[str, Any]], list[Any]]:
    """The events, and a list of what is to happen whenever there is nothing new; at its end Nothing is raised."""
    happens: list[Any] = []

    def idle() -> None:
        if not happens:
            raise Nothing
        happens.pop(0)()

    return follow_events(directory, last=last, event=event, idle=idle, ended=lambda: False), happens


def seen(rows: Iterator[dict[str, Any]]) -> list[Any]:
    found = []
    try:
        for row in rows:
            found.append((row["event"], row.get("n")))
    except Nothing:
        return found
    raise AssertionError("it ended by itself")


def write(directory: Path, *numbers: int, event: str = "commit") -> None:
    log = EventLog(directory)
    for n in numbers:
        log(event, n=n)
    log.close()


def test_the_last_events_come_first_and_then_each_new_one(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3)
    rows, happens = follow(tmp_path, last=2)
    happens += [lambda: write(tmp_path, 4), lambda: None, lambda: write(tmp_path, 5, 6)]
    assert seen(rows) == [("commit", n) for n in (2, 3, 4, 5, 6)]


def test_only_the_events_that_are_asked_for_are_followed(tmp_path: Path) -> None:
    rows, happens = follow(tmp_path, event="away")
    happens += [lambda: write(tmp_path, 1), lambda: write(tmp_path, 2, event="away")]
    assert seen(rows) == [("away", 2)]


def test_a_file_that_is_renamed_and_started_anew_is_followed_without_a_gap(tmp_path: Path) -> None:
    def rotate() -> None:
        write(tmp_path, 2)  # the last words in the old file, not read yet
        (tmp_path / EVENTS_FILE).rename(tmp_path / "events.1.jsonl")

    write(tmp_path, 1)
    rows, happens = follow(tmp_path)
    happens += [rotate, lambda: write(tmp_path, 3), rotate, lambda: None, lambda: write(tmp_path, 4)]
    assert seen(rows) == [("commit", n) for n in (1, 2, 3, 2, 4)]


def rotate(directory: Path) -> None:
    put_aside(directory / EVENTS_FILE)
    pack_put_aside(directory / EVENTS_FILE)


def test_the_last_events_come_also_from_files_that_were_put_aside(tmp_path: Path) -> None:
    for n in (1, 3, 5):
        write(tmp_path, n, n + 1)
        rotate(tmp_path)
    write(tmp_path, 7)
    rows, _ = follow(tmp_path, last=4)
    assert seen(rows) == [("commit", n) for n in (4, 5, 6, 7)]


def test_who_looks_again_only_after_several_files_were_put_aside_and_packed_misses_none(tmp_path: Path) -> None:
    """A pager that nobody scrolls stops the command for days."""

    def much() -> None:
        for n in (2, 4, 6):
            write(tmp_path, n, n + 1)
            rotate(tmp_path)
        write(tmp_path, 8)

    write(tmp_path, 1)
    rows, happens = follow(tmp_path)
    happens += [much, lambda: write(tmp_path, 9), lambda: rotate(tmp_path), lambda: write(tmp_path, 10)]
    assert seen(rows) == [("commit", n) for n in range(1, 11)]


def test_a_file_that_was_emptied_is_read_from_its_beginning_and_no_older_one_again(tmp_path: Path) -> None:
    write(tmp_path, 0)
    rotate(tmp_path)
    write(tmp_path, 1, 2)
    rows, happens = follow(tmp_path)
    happens += [lambda: (tmp_path / EVENTS_FILE).write_bytes(b""), lambda: write(tmp_path, 3)]
    assert seen(rows) == [("commit", n) for n in (0, 1, 2, 3)]


def test_half_a_line_is_told_when_it_is_whole_and_a_torn_one_never(tmp_path: Path) -> None:
    path = tmp_path / EVENTS_FILE
    rows, happens = follow(tmp_path)

    def add(text: str) -> None:
        with path.open("a") as file:
            file.write(text)

    happens += [
        lambda: add('{"event": "com'),
        lambda: add('mit", "n": 1}\n{"torn'),
        lambda: add('\n[3]\n{"event": "x"}\n'),
    ]
    assert seen(rows) == [("commit", 1), ("x", None)]
