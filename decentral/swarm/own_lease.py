"""What this peer says of itself: one lease, renewed under a growing number, and sooner when there is news."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import anyio

from decentral.wire.keys import Digest, Signer, peer_name
from decentral.wire.lease import MAX_ADDRESS, MAX_ADDRESSES, Lease, seal_lease

_TWIN = 5  # times our own lease comes back newer; a restart explains a few

logger = logging.getLogger("decentral.swarm")


class OwnLease:
    """The lease of ``signer``'s peer, which can be dialled at ``addresses``; it lasts ``ttl`` s."""

    def __init__(self, signer: Signer, run: Digest, ttl: float, addresses: Callable[[], Sequence[str]]) -> None:
        self._signer, self._run, self._ttl, self._addresses = signer, run, ttl, addresses
        self._fields: dict[str, Any] = {"epoch": 0, "round": 0, "digest": bytes(32), "state": 0, "uplink": 0}
        self._version = _installed_version()
        self._sequence = 0
        self._outrun = 0
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

        It is from before a restart then, or from another process.
        """
        if own.sequence <= self._sequence:
            return
        self._sequence = own.sequence
        self._news.set()
        self._outrun += 1
        if self._outrun == _TWIN:
            logger.warning(
                "another process runs with this identity (%s) at %s; end one, or give it a key of its own",
                peer_name(self._signer.peer),
                own.addresses[0] if own.addresses else "an unknown address",
            )


def _installed_version() -> str:
    try:
        return version("decentral")[:32]
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "source"
