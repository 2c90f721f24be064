"""What stands on the screen of a view, as lines. ``python -m tests.watch.screens`` writes the golden ones anew."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from textual.pilot import Pilot

from decentral.watch.app import Watch
from tests.kit.site import GOLDEN

SIZES = ((80, 24), (60, 20), (200, 50))
SCREENS = Path(__file__).parent / "golden"
NEVER = 3600.0  # s: a test looks when it wants to

Driver = Callable[[Watch, Pilot[BaseException]], Awaitable[object]]


def drive(directory: Path, driver: Driver, size: tuple[int, int] = (80, 24)) -> Watch:
    """Let ``driver`` type into a view of ``directory`` without a terminal; returns the view once it has ended."""

    async def driven() -> Watch:
        app = Watch(directory, period=NEVER)
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            await driver(app, pilot)
        return app

    return asyncio.run(driven())


async def typed(app: Watch, pilot: Pilot[BaseException], *keys: str) -> list[str]:
    """The screen once these keys were obeyed."""
    await pilot.press(*keys)
    await pilot.pause()
    return lines_of(app)


def lines_of(app: Watch) -> list[str]:
    """The screen as it is now, without the blanks at the ends."""
    return [line.text.rstrip() for line in app.screen._compositor.render_strips()]


def screen(directory: Path, *keys: str, size: tuple[int, int] = (80, 24)) -> list[str]:
    """What there is to see after these keys."""
    seen: list[str] = []

    async def look(app: Watch, pilot: Pilot[BaseException]) -> None:
        seen.extend(await typed(app, pilot, *keys))

    drive(directory, look, size)
    return seen


def golden(size: tuple[int, int]) -> Path:
    """The file of a size."""
    return SCREENS / f"{size[0]}x{size[1]}.txt"


if __name__ == "__main__":
    os.environ["TZ"] = "UTC"
    time.tzset()
    SCREENS.mkdir(exist_ok=True)
    for size in SIZES:
        golden(size).write_text("\n".join(screen(GOLDEN, size=size)) + "\n", encoding="utf-8")
