"""Tests that are coroutines: each runs in a loop of its own, and is over within a minute or fails."""

from __future__ import annotations

import inspect
from functools import partial

import anyio
import pytest
import trio
import trio.testing

from tests.kit.patience import PATIENCE


@pytest.fixture
def virtual_time() -> None:
    """Seconds that nobody works in pass at once: for a test, or a module (``pytest.mark.usefixtures``), on trio."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """On the loop that is the argument ``backend``, or that of the argument ``world``; asyncio's otherwise."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    script = partial(pyfuncitem.obj, **given)
    if "virtual_time" in pyfuncitem.fixturenames:
        trio.run(script, clock=trio.testing.MockClock(autojump_threshold=0))
        return True

    timeout = pyfuncitem.get_closest_marker("timeout")

    async def bounded() -> None:
        with anyio.fail_after(PATIENCE if timeout is None else timeout.args[0]):
            await script()

    anyio.run(bounded, backend=given.get("backend") or getattr(given.get("world"), "backend", "asyncio"))
    return True
