"""To whom the same thing is said again, and when."""

from __future__ import annotations

from decentral.flow.upload import Repeats

A, B = b"a" * 32, b"b" * 32


def times_told(repeats: Repeats, seconds: int, said: object = "let me in") -> list[int]:
    return [second for second in range(seconds) if repeats.due(said, [A], float(second))]


def test_each_wait_is_twice_as_long_as_the_one_before_up_to_the_longest() -> None:
    assert times_told(Repeats(1.0, 8.0), 40) == [0, 1, 3, 7, 15, 23, 31, 39]


def test_who_comes_later_is_told_at_once_and_nobody_else_is() -> None:
    repeats = Repeats(1.0, 8.0)
    assert repeats.due("let me in", [A], 0.0) == [A]
    assert repeats.due("let me in", [A, B], 0.5) == [B]
    assert repeats.due("let me in", [A, B], 1.0) == [A]


def test_something_new_is_said_to_all_at_once() -> None:
    repeats = Repeats(1.0, 8.0)
    assert times_told(repeats, 6) == [0, 1, 3]
    assert repeats.due("let me in, I have caught up", [A], 6.0) == [A]
    assert repeats.due("let me in, I have caught up", [A], 7.0) == [A], "it waits as short as at first"
