"""One peer's part in it, put together: it keeps for others, and others keep for it."""

from __future__ import annotations

from collections.abc import Callable, Collection

import anyio

from decentral.flow.offload import Offload
from decentral.manifest import Redundancy
from decentral.redundancy.giver import Giver, WayOut
from decentral.redundancy.keeper import Keeper
from decentral.redundancy.recovery import Recovery
from decentral.redundancy.sealing import Seals
from decentral.wire.keys import PeerId

TIDY_EVERY = 60.0  # s


class RedundancyService:
    """Made before its transport is entered, as it serves."""

    def __init__(
        self,
        terms: Redundancy,
        seals: Seals,
        way_out: WayOut,
        *,
        members: Callable[[], Collection[PeerId]],
        live: Callable[[], Collection[PeerId]],
        offload: Offload,
    ) -> None:
        self.terms, self._seals, self._way_out, self._live, self._offload = terms, seals, way_out, live, offload
        self.keeper = Keeper(way_out.transport, terms, members)
        self.giver = Giver(terms, seals, way_out, offload)

    async def run(self) -> None:
        """Forget who is gone for good, until cancelled."""
        while True:
            self.keeper.forget_old()
            await anyio.sleep(TIDY_EVERY)

    def recovery(self) -> Recovery:
        """A search for what others keep of this peer's."""
        return Recovery(self._way_out.transport, self._seals, self._live, self._offload)
