"""Tests that are coroutines: a scene runs each of them, and gives it what it has set up."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import trio
import trio.testing


def played(scene: Callable[[Callable[[Any], Awaitable[None]]], object]) -> Callable[[Callable[..., Any]], Any]:
    """``scene`` gets the test as a function of its first parameter; pytest gives the parameters after that."""

    def decorate(script: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        @functools.wraps(script)
        def test(**given: object) -> None:
            scene(lambda first: script(first, **given))

        signature = inspect.signature(script)
        test.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])  # type: ignore[attr-defined]
        return test

    return decorate


def without_waiting(main: Callable[[], Awaitable[Any]]) -> Any:
    """On trio, by a clock that jumps to whatever is due next."""
    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
