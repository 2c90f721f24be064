"""A daemon kept running: started, asked who it is and where it listens, and started again when it died, or when it has
lost its place at a relay.

It comes back with the same key, on the same ports if they are still free, and dials again who was dialled before.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import anyio.abc

from decentral.errors import ListenError, PayloadError, PeerUnreachable, TransportError
from decentral.transport.base import AddressBook, check_listen, pin_ports
from decentral.transport.daemon.control import Control
from decentral.transport.daemon.process import DaemonOptions, DaemonProcess, KeyFile, launch
from decentral.transport.reachability import find_unnamed_places, grants_little
from decentral.wire.keys import PeerId, peer_from_name, peer_name

logger = logging.getLogger("decentral.transport")

_ADDRESSES_EVERY = 5.0  # s between looks at the daemon's addresses: relays and NATs change them
_LISTEN_POLL = 0.02  # s between questions to a daemon that does not listen yet
_FIRST_ATTEMPTS = 3  # one may be killed while it starts; what is wrong with all three is for the user to mend
_STINGY = 6  # starts for the sake of the limits; then a useless relay is better than no peer
_LONGEST_PAUSE = 30.0  # s between attempts to start a daemon again

Prepare = Callable[[Control], Awaitable[None]]


class Supervisor:
    """Keeps one peer's daemon. ``known`` are those that a new daemon dials again."""

    def __init__(self, identity: KeyFile, listen: tuple[str, ...], options: DaemonOptions, known: AddressBook) -> None:
        self.starts = 0  # daemons started so far; grows when one died
        self.pid: int | None = None  # of the newest
        self._named: Sequence[str] = ()  # the addresses that it says it has
        self._unnamed: Sequence[str] = ()  # places that it has without a word of them
        self._key, self._peer = identity.path.absolute(), identity.peer
        self._options, self._known = options, known
        self._listen = self._pinned = listen
        self._placeless: Placeless | None = None
        self._stingy = 0  # starts in vain, as they would have made a useless relay
        self._up = anyio.Event()

    async def run(
        self,
        group: anyio.abc.TaskGroup,
        control: Control,
        prepare: Prepare,
        *,
        task_status: anyio.abc.TaskStatus[None],
    ) -> None:
        """Have a daemon behind ``control`` until cancelled; ``prepare`` each one before it counts as started.

        Raises ListenError or TransportError when the first one cannot be started, and nothing after that.
        """
        pause, attempts = 0.1, 0
        while True:
            try:
                async with self._run_one(group, control, prepare) as child:
                    if self.starts == 1:
                        task_status.started()
                    pause = 0.1
                    code = await child.wait()
                    logger.warning("the libp2p daemon ended (code %d) and is started again", code)
            except TransportError as error:
                attempts += 1
                if self.starts == 0 and (attempts == _FIRST_ATTEMPTS + self._stingy or isinstance(error, ListenError)):
                    raise
                logger.warning("the libp2p daemon cannot be started again, next try in %.1f s: %s", pause, error)
            await anyio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where the daemon can be dialled."""
        return tuple(dict.fromkeys((*self._named, *self._unnamed)))

    async def until_up(self, peer: PeerId) -> None:
        """Wait while a daemon is being started. PeerUnreachable, which names ``peer``, when that takes too long."""
        with anyio.move_on_after(self._options.dial_timeout):
            await self._up.wait()
            return
        raise PeerUnreachable(f"{peer_name(peer)}: the libp2p daemon is being started again; try again")

    async def until_restarted(self, starts: int) -> None:
        """Wait until the daemon with number ``starts`` is no more and its successor answers."""
        while self.starts == starts or not self._up.is_set():
            await (self._down if self._up.is_set() else self._up).wait()

    # ---- one daemon ----

    @asynccontextmanager
    async def _run_one(
        self, group: anyio.abc.TaskGroup, control: Control, prepare: Prepare
    ) -> AsyncIterator[DaemonProcess]:
        arguments = self._arguments(control.socket)
        Path(control.socket).unlink(missing_ok=True)  # a killed daemon leaves its socket behind
        timeout, watcher = self._options.start_timeout, self._options.watcher
        async with launch(arguments, group, timeout=timeout, watcher=watcher) as child, control.held():
            await self._set_up(child, control, prepare)
            async with anyio.create_task_group() as beside:
                beside.start_soon(self._look_at_addresses, control)
                beside.start_soon(self._dial_again, control)
                if self._options.wants_a_place:
                    beside.start_soon(self._keep_a_place, child, control)
                try:
                    yield child
                finally:
                    self._up = anyio.Event()
                    self._down.set()
                    beside.cancel_scope.cancel()

    def _arguments(self, socket: str) -> list[str]:
        listen = ",".join(self._listen_now())
        return [f"-listen=/unix{socket}", f"-id={self._key}", f"-hostAddrs={listen}", *self._options.flags()]

    def _listen_now(self) -> tuple[str, ...]:
        """Return the addresses of before, or others of their kind when somebody took those meanwhile."""
        try:
            check_listen(self._pinned)
        except ListenError:
            return self._listen
        return self._pinned

    async def _set_up(self, child: DaemonProcess, control: Control, prepare: Prepare) -> None:
        peer, found = await self._listening(control)
        if peer != self._peer:
            raise TransportError(f"{self._key}: holds the key of {peer_name(peer)} now; put the old one back")
        await prepare(control)
        if self._options.reachability == "public" and self._stingy < _STINGY and await grants_little(peer, found):
            self._stingy += 1
            raise TransportError("as a relay it would carry 128 KiB a connection; another start grants more")
        self._named, self._unnamed = found, ()
        if self._options.wants_a_place:
            self._named, self._unnamed = await until_placed(control, peer, self._options.relays, found)
        self._pinned = pin_ports(self._listen, found)
        self.starts += 1
        self.pid = child.pid
        self._down = anyio.Event()
        self._up.set()

    async def _listening(self, control: Control) -> tuple[PeerId, list[str]]:
        """Ask who the daemon is and where it listens, until it says: it answers a moment before it does, with no
        address at all, and an invite made then would lead nowhere.
        """
        with anyio.move_on_after(self._options.start_timeout):
            while True:
                peer, found = await control.identify()
                if found:
                    return peer, found
                await anyio.sleep(_LISTEN_POLL)
        raise TransportError(f"the libp2p daemon listens on none of {', '.join(self._listen)}; give another address")

    # ---- beside it ----

    async def _look_at_addresses(self, control: Control) -> None:
        while True:
            await anyio.sleep(_ADDRESSES_EVERY)
            try:
                self._named = (await control.identify())[1]
            except TransportError as error:
                logger.debug("the daemon's addresses: %s", error)

    async def _dial_again(self, control: Control) -> None:
        for peer, addresses in self._known.entries() if self.starts > 1 else []:
            try:
                await control.connect(peer, addresses)
            except TransportError as error:
                logger.debug("after the restart: %s", error)

    async def _keep_a_place(self, child: DaemonProcess, control: Control) -> None:
        self._placeless = self._placeless or Placeless(anyio.current_time())
        await until_worth_a_restart(
            self._placeless, control, self._peer, self._options.relays, lambda: self._named, self._have_unnamed
        )
        logger.warning("no place at a relay although one answers: the libp2p daemon is started again")
        child.kill()

    def _have_unnamed(self, places: Sequence[str]) -> None:
        self._unnamed = places


# ---- a private daemon's place at a relay ----
#
# It is waited for at the start, and regained by starting the daemon again.
#
# go-libp2p 0.32 does not come back to a relay that was gone: none took its place again within 240 s of the relay's
# restart, dialled or not (docs/relay.md). A daemon that starts takes one at once.
#
# Nor does it name a place at a relay on loopback or a private network, a VPN say, although it keeps one: that is found
# out by dialling this peer through the relay.

FIRST_PATIENCE, LONGEST_PATIENCE = 20.0, 640.0  # s without a place before the daemon is started again
LOOK_EVERY = 5.0  # s between looks whether there is a place
FIRST_PLACE = 5.0  # s for a place before the start goes on without; a relay grants one within milliseconds
NAMED = 1.0  # s of those for the daemon to name it
_POLL = 0.02  # s between questions while it is waited for


class Placeless:
    """How long there was no place. Times in seconds, of any clock that does not stand still."""

    def __init__(self, now: float) -> None:
        self._since, self._patience = now, FIRST_PATIENCE

    def look(self, addresses: Sequence[str], now: float) -> bool:
        """Tell whether it has lasted too long; ``addresses`` are the daemon's."""
        if has_place(addresses):
            self._since, self._patience = now, FIRST_PATIENCE
        return now - self._since >= self._patience

    def note_restart(self, now: float) -> None:
        """Give a daemon that was started again time, and more of it than before."""
        self._since, self._patience = now, min(2 * self._patience, LONGEST_PATIENCE)


def has_place(addresses: Sequence[str]) -> bool:
    """Tell whether one of them leads through a relay."""
    return any("/p2p-circuit" in address for address in addresses)


async def until_placed(
    control: Control, me: PeerId, relays: Sequence[str], named: Sequence[str]
) -> tuple[Sequence[str], Sequence[str]]:
    """Return what the daemon names and what it does not, once one of them leads through a relay, or after a while.

    An invite that is made before leads nowhere.
    """
    unnamed: Sequence[str] = ()
    with anyio.move_on_after(FIRST_PLACE):
        await _any_answers(control, relays)
        with anyio.move_on_after(NAMED):
            while not has_place(named):
                await anyio.sleep(_POLL)
                named = (await control.identify())[1]
        while not has_place((*named, *unnamed)):
            unnamed = await find_unnamed_places(me, relays)
            await anyio.sleep(_POLL)
    return named, unnamed


async def until_worth_a_restart(
    placeless: Placeless,
    control: Control,
    me: PeerId,
    relays: Sequence[str],
    named: Callable[[], Sequence[str]],
    on_unnamed: Callable[[Sequence[str]], None],
) -> None:
    """Return when there was no place for long, and a relay answers that would have one.

    ``on_unnamed`` is told of the places that the daemon has without a word of them.
    """
    while True:
        await anyio.sleep(LOOK_EVERY)
        if not placeless.look(named(), anyio.current_time()):
            continue
        unnamed = await find_unnamed_places(me, relays)
        on_unnamed(unnamed)
        if not placeless.look(unnamed, anyio.current_time()):
            continue
        if await _any_answers(control, relays):
            placeless.note_restart(anyio.current_time())
            return


async def _any_answers(control: Control, relays: Sequence[str]) -> bool:
    for address in relays:
        with suppress(TransportError, PayloadError):
            await control.connect(peer_from_name(address.rpartition("/p2p/")[2]), [address])
            return True
    return False
