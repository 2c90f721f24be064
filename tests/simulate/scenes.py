"""Swarms on good machines, and what a test makes befall them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import anyio

from decentral.simulate.scenario import PROFILES
from decentral.simulate.troubles import Afflict
from decentral.simulate.world import World

CALM = replace(PROFILES["lab"], crashes=0.0, sleeps=0.0, partitions=0.0)


@dataclass
class Befalls:
    """Once, and then nothing any more."""

    story: Callable[[World], Awaitable[None]]
    world: World

    async def run(self) -> None:
        """See Trouble."""
        await self.story(self.world)
        await anyio.sleep_forever()


def befalls(story: Callable[[World], Awaitable[None]]) -> Afflict:
    """For `decentral.simulate.simulation.simulate`."""
    return lambda world: Befalls(story, world)  # type: ignore[arg-type]  # a World is what is afflicted


async def until_true(holds: Callable[[], bool]) -> None:
    """Wait in virtual time."""
    while not holds():
        await anyio.sleep(0.25)
