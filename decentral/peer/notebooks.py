"""A coroutine from synchronous code, also where an event loop runs in this thread already, as it does in a notebook."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import anyio

from decentral.errors import first_of

T = TypeVar("T")


def run_apart(work: Callable[..., Awaitable[T]], *args: Any) -> T:
    """``work(*args)`` on a loop of its own: here, or on a thread where this one's is taken.

    An error in a task group comes as it was raised: of a group, a SystemExit of a handler of signals was status 1.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run(work, *args)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: _run(work, *args)).result()


def _run(work: Callable[..., Awaitable[T]], *args: Any) -> T:
    try:
        return anyio.run(work, *args)
    except BaseExceptionGroup as group:
        raise first_of(group) from None
