"""tests/observe/test_events.py"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from decentral.observe.events import EVENTS_FILE, EventLog, follow_events, plain_words, read_events
from decentral.observe.lines import pack_put_aside, put_aside
from decentral.observe.metrics import MetricsLog, read_metrics


def clock(*times: float):
    return iter(times).__next__


def test_an_event_carries_its_version_both_clocks_and_its_fields(tmp_path: Path) -> None:
    log = EventLog(tmp_path, wall=clock(100.0), monotonic=clock(7.25))
    log("commit", round=3, digest=b"\xab")
    log.close()
    assert list(read_events(tmp_path)) == [
        {"v": 1, "t": 100.0, "mono": 7.25, "event": "commit", "round": 3, "digest": "ab"}
    ]


def test_fields_cannot_overwrite_the_stamps(tmp_path: Path) -> None:
    log = EventLog(tmp_path, wall=clock(1.0), monotonic=clock(2.0))
    log("odd", t="mine", v=99)
    log.close()
    (row,) = read_events(tmp_path)
    assert (row["t"], row["v"], row["t_"], row["v_"]) == (1.0, 1, "mine", 99)


def test_observed_mappings_are_named_by_their_event_or_kind(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.observe({"event": "offer", "round": 1})
    log.observe({"kind": "vote", "round": 1})
    log.observe({"round": 2})
    log.close()
    assert [row["event"] for row in read_events(tmp_path)] == ["offer", "vote", "event"]


def test_events_can_be_asked_for_by_name_and_by_number(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    for i in range(10):
        log("even" if i % 2 == 0 else "odd", i=i)
    log.close()
    assert [row["i"] for row in read_events(tmp_path, last=3)] == [7, 8, 9]
    assert [row["i"] for row in read_events(tmp_path, last=2, event="even")] == [6, 8]


def test_a_directory_without_events_has_none(tmp_path: Path) -> None:
    assert list(read_events(tmp_path)) == []


def test_an_event_in_plain_words_is_short_and_has_no_stamps() -> None:
    row = {"v": 1, "t": 0.0, "mono": 1.0, "event": "new", "round": 3, "loss": 1.23456789, "x": "y" * 99}
    assert plain_words(row) == f"new round=3 loss=1.235 x={'y' * 61}..."


def test_metrics_tell_inner_from_outer_steps(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, monotonic=clock(10.0, 10.5, 11.0))
    log.inner(1, loss=5.5)
    log.outer(1, bits_per_byte=7.9, bytes_sent=120)
    log.close()
    assert list(read_metrics(tmp_path, "inner")) == [{"scope": "inner", "step": 1, "seconds": 0.5, "loss": 5.5}]
    (outer,) = read_metrics(tmp_path, "outer")
    assert (outer["step"], outer["bits_per_byte"], outer["bytes_sent"]) == (1, 7.9, 120)


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
