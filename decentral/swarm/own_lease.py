"""What this peer says of itself: one lease, renewed under a growing number, and sooner when there is news."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import anyio

from decentral.errors import ConfigError
from decentral.wire.keys import Digest, Signer, peer_name
from decentral.wire.messages import MAX_ADDRESS, MAX_ADDRESSES, Lease, seal_lease

_LOOKED_AT, _TWIN = 12, 5  # our last renewals; those in which what we never said came back: a restart explains few


class OwnLease:
    """The lease of ``signer``'s peer, which can be dialled at ``addresses``; it lasts ``ttl`` s."""

    def __init__(self, signer: Signer, run: Digest, ttl: float, addresses: Callable[[], Sequence[str]]) -> None:
        self._signer, self._run, self._ttl, self._addresses = signer, run, ttl, addresses
        self._fields: dict[str, Any] = {"epoch": 0, "round": 0, "digest": bytes(32), "state": 0, "uplink": 0}
        self._version = _installed_version()
        self._sequence = 0
        self._said = set[str]()  # every address of this life
        self._foreign = deque([False], _LOOKED_AT)  # by renewal: did what this life never said come back?
        self._doubled = anyio.Event()
        self._elsewhere = "an unknown address"  # of who is doubled
        self._news = anyio.Event()
        self._signed: tuple[Lease | None, Lease | None] = None, None  # the last draft, and the lease it became

    def update(self, given: Mapping[str, int | Digest | None]) -> None:
        """Say these fields of the lease from now on; None leaves one as it is."""
        news = {name: value for name, value in given.items() if value not in (None, self._fields[name])}
        if news:
            self._fields |= news
            self._news.set()

    def renew(self) -> None:
        """Count on: what is sealed from now on is newer than all before, and what is known now is no news any more."""
        self._sequence += 1
        self._foreign.append(False)
        self._news = anyio.Event()

    async def until_news(self) -> None:
        """Wait until there is something to say that was not so at the last ``renew``."""
        await self._news.wait()

    def sealed(self) -> Lease:
        """What this peer says of itself now, signed."""
        draft = self.draft()
        before, sealed = self._signed
        if sealed is None or draft != before:
            sealed = seal_lease(draft, self._signer)
            self._signed = draft, sealed
        return sealed

    def draft(self) -> Lease:
        """The same, not signed."""
        addresses = [address for address in self._addresses() if len(address) <= MAX_ADDRESS][:MAX_ADDRESSES]
        self._said.update(addresses)
        return Lease(
            run=self._run,
            peer=self._signer.peer,
            sequence=self._sequence,
            ttl=math.ceil(self._ttl),
            addresses=tuple(addresses),
            version=self._version,
            **self._fields,  # Any: integers and one digest, by the names of Lease
        )

    def came_back(self, own: Lease) -> None:
        """Somebody has ``own``. When it is newer than what was made here, go on above that.

        It is from before a restart then, or from another process, as one of today's number and of addresses that were
        never ours is: the dead say nothing new, the living do again and again.
        """
        if own.sequence > self._sequence:
            self._sequence = own.sequence
            self._news.set()
        elif own.sequence < self._sequence or self._said.issuperset(own.addresses):
            return
        self._foreign[-1] = True
        if sum(self._foreign) >= _TWIN:
            self._elsewhere = own.addresses[0] if own.addresses else self._elsewhere
            self._doubled.set()

    async def until_doubled(self) -> None:
        """Wait until another process is seen to run with this key, which might vote twice in one ballot: ConfigError.

        Whoever sees it ends, which may be both: neither knows which of them is meant to live.
        """
        await self._doubled.wait()
        name = peer_name(self._signer.peer)
        raise ConfigError(
            f"another process runs with this identity ({name}) at {self._elsewhere}; end one of the two, or give it a "
            "key of its own, and start the other again"
        )


def _installed_version() -> str:
    try:
        return version("decentral")[:32]
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "source"
