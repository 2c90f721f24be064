"""hivemind's DHT beside the directory: how peers that share no bootstrap peer still hear of each other.

A lease found there is only a hint where to dial; nobody counts as present before it answers itself. So neither a
forged expiry nor a wrong clock matters, and when the DHT fails, the directory does not notice.

Crosses the wire: one lease to at most five peers per third of its life, and about four look-ups of all of them by the
whole swarm: an answer holds the lease of every peer, and comes from each of the five, so that a look-up by everybody
would cost them N**2 leases.

Source: Maymounkov and Mazieres, "Kademlia: A peer-to-peer information system based on the XOR metric", 2002.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import anyio

from decentral.errors import PayloadError
from decentral.swarm.leases import MAX_LEASE_NBYTES, OwnLease, read_lease
from decentral.transport.base import DhtHost
from decentral.transport.protocols.messages import peer_to_id
from decentral.wire.keys import Digest, PeerId, peer_name
from decentral.wire.messages import MAX_PEERS, Lease, encode

T = TypeVar("T")
Handler = Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object]  # Any: asyncio's

_PATIENCE = 10.0  # s for any one call; hivemind's own wait without end once the daemon is dead
_LOOKS = 4  # look-ups per renewal, of all peers together
_PINGED = 8  # live peers per renewal that are added to the routing table
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # s between attempts when it fails

logger = logging.getLogger("decentral.swarm")


class DirectoryView(Protocol):
    """The directory, as the DHT needs it: the peers that are known, and where to put what is found."""

    run_digest: Digest
    ttl: float  # s that a lease lasts

    @property
    def peer(self) -> PeerId:
        """This peer."""
        ...

    @property
    def looking(self) -> bool:
        """Tell whether nobody else is here."""
        ...

    def live(self) -> Mapping[PeerId, Lease]:
        """The other peers that are here."""
        ...

    @property
    def own(self) -> OwnLease:
        """The lease that this peer gives of itself."""
        ...

    def hint(self, lease: Lease) -> None:
        """Look whether a peer is where this lease says."""
        ...

    async def until_changed(self) -> None:
        """Wait until somebody came, went, or said something new."""
        ...


async def share(host: DhtHost, directory: DirectoryView) -> None:
    """Keep this peer's lease in the DHT and look for others there, until cancelled. Never raises an error."""
    pause = _FIRST_PAUSE
    while directory.looking:  # nobody to ask, and no reason to load hivemind yet
        await directory.until_changed()
    while True:
        starts = host.starts
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(_end_with_daemon, host, starts, group.cancel_scope)
                async with _node(host, directory.run_digest) as node:
                    pause = _FIRST_PAUSE
                    await _exchange_forever(node, directory)
        except Exception as error:  # noqa: BLE001  hivemind raises what it likes; none of it may reach the directory
            logger.debug("the DHT failed and is tried again in %.0f s: %r", pause, error)
        await anyio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def dht_key(run: Digest) -> str:
    """Return the key under which the leases of a run are kept."""
    return f"decentral/1/{run.hex()}"


async def _end_with_daemon(host: DhtHost, starts: int, scope: anyio.CancelScope) -> None:
    await host.until_restarted(starts)
    scope.cancel()


@asynccontextmanager
async def _node(host: DhtHost, run: Digest) -> AsyncIterator[Any]:  # Any: hivemind has no types
    async with host.attach() as client:
        from hivemind.dht.node import DHTNode

        with anyio.fail_after(_PATIENCE):
            node = await DHTNode.create(
                client,
                ensure_bootstrap_success=False,
                strict=False,
                cache_size=MAX_PEERS,
                client_mode=host.is_private,  # a peer that cannot be asked holds no keys
                cache_refresh_before_expiry=0,  # a refresh of its own would ask while nobody wants to know
                record_validator=lease_validator(run),
            )
        loop = asyncio.get_running_loop()
        before = loop.get_exception_handler()
        loop.set_exception_handler(partial(_no_word_of_hivemind, before))
        try:
            yield node
        finally:
            loop.set_exception_handler(before)
            with anyio.move_on_after(1.0, shield=True):  # it asks a daemon that may be dead
                await node.shutdown()


def _no_word_of_hivemind(before: Handler | None, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Its look-ups are tasks of their own, which fail when a peer goes; asyncio showed that to whoever joined."""
    coro = context["future"].get_coro() if isinstance(context.get("future"), asyncio.Task) else None
    code = getattr(coro, "cr_code", None)
    if code is not None and "hivemind" in Path(code.co_filename).parts:
        logger.debug("the DHT failed: %r", context.get("exception"))
    else:
        (before or type(loop).default_exception_handler)(loop, context)


async def _exchange_forever(node: Any, directory: DirectoryView) -> None:
    turn = 0
    while True:
        live = list(directory.live())
        turn += 1
        for n in range(min(_PINGED, len(live))):
            await _ping(node, live[(_PINGED * turn + n) % len(live)])
        if live:
            await _store(node, directory)
            if turn == 1 or looks_in(turn, directory.peer, len(live)):
                await _look(node, directory)
        with anyio.move_on_after(directory.ttl / 3):
            await _until_company(directory)


def looks_in(turn: int, peer: PeerId, others: int) -> bool:
    """Tell whether it is ``peer``'s turn to look for all: everybody's in a small swarm, four peers' in a large one."""
    every = max(1, (others + 1) // _LOOKS)
    return (turn + int.from_bytes(peer[:8], "little")) % every == 0


async def _until_company(directory: DirectoryView) -> None:
    """Return at once when the first peer appears; later ones can wait for their turn."""
    while directory.looking:
        await directory.until_changed()
    await anyio.sleep_forever()


async def _ping(node: Any, peer: PeerId) -> None:
    from hivemind.p2p import PeerID

    with anyio.move_on_after(_PATIENCE):
        await node.protocol.call_ping(PeerID(peer_to_id(peer)))


async def _store(node: Any, directory: DirectoryView) -> None:
    from hivemind.utils.timed_storage import get_dht_time

    lease, key = directory.own.seal(), dht_key(directory.run_digest)
    with anyio.move_on_after(_PATIENCE):
        await node.store(
            key, encode(lease), subkey=peer_name(lease.peer), expiration_time=get_dht_time() + directory.ttl
        )


async def _look(node: Any, directory: DirectoryView) -> None:
    found = None
    with anyio.move_on_after(_PATIENCE):
        found = await node.get(dht_key(directory.run_digest), latest=True)
    values = found.value if found is not None and isinstance(found.value, dict) else {}
    for lease in map(_lease_in, list(values.values())[:MAX_PEERS]):
        if lease is not None:
            directory.hint(lease)


def _lease_in(item: Any) -> Lease | None:
    """Return the lease in one value of the DHT, if it is one."""
    value = getattr(item, "value", None)
    if not isinstance(value, bytes) or len(value) > MAX_LEASE_NBYTES:
        return None
    try:
        return read_lease(value)
    except PayloadError:
        return None


# ---- what is stored for others ----
#
# Signed leases of its run, each under its signer's name, are the only records that a peer stores for others. Otherwise
# anybody could fill this process's memory with records of any kind, or overwrite another peer's lease.

SKEW = 300.0  # s two machines' clocks may differ before a record is refused
_STORED = 4 * MAX_PEERS  # peers whose records are taken; identities cost nothing to make


def lease_validator(run: Digest) -> Any:  # Any: hivemind has no types
    """Return hivemind's validator of records that takes leases of ``run`` only. Imports hivemind, and torch with it."""
    from hivemind.dht.validation import RecordValidatorBase

    kind: Any = type("LeaseValidator", (LeaseRule, RecordValidatorBase), {})
    return kind(run)


class LeaseRule:
    """The rule for records: a lease of ``run`` under its key, the sub-key the name of the peer that signed it."""

    def __init__(self, run: Digest) -> None:
        from hivemind.dht.routing import DHTID

        self._key, self._run = DHTID.generate(source=dht_key(run)).to_bytes(), run
        self._ends: dict[PeerId, float] = {}  # when each peer's record ends, in DHT time

    def validate(self, record: Any) -> bool:  # Any: hivemind's DHTRecord
        """Tell whether a record is taken. Never raises."""
        from hivemind.utils.timed_storage import get_dht_time

        now = get_dht_time()
        if record.key != self._key or len(record.value) > MAX_LEASE_NBYTES + 8:
            return False
        try:
            lease = read_lease(_unpack(record.value, bytes))
            name = _unpack(record.subkey, str)
        except (PayloadError, ValueError):
            return False
        if lease.run != self._run or name != peer_name(lease.peer):
            return False
        end = float(record.expiration_time)
        return end <= now + lease.ttl + SKEW and self._fits(lease.peer, end, now)

    def _fits(self, peer: PeerId, end: float, now: float) -> bool:
        if peer not in self._ends and len(self._ends) >= _STORED:
            self._ends = {other: other_end for other, other_end in self._ends.items() if other_end > now}
            if len(self._ends) >= _STORED:
                return False
        self._ends[peer] = max(end, self._ends.get(peer, 0.0))
        return True


def _unpack(data: bytes, kind: type[T]) -> T:
    """Read a msgpack value of a plain kind. ValueError for anything else, msgpack's own errors among them."""
    from hivemind.utils import MSGPackSerializer

    try:
        value = MSGPackSerializer.loads(data)
    except Exception as error:  # its decoder's errors share no base, and RecursionError is among them
        raise ValueError("not msgpack") from error
    if not isinstance(value, kind):
        raise ValueError(f"{type(value).__name__} where {kind.__name__} belongs")
    return value
