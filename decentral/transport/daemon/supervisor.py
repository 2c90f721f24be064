"""Keeps a daemon running: started, asked who it is and where it listens, and started again when it died.

It comes back with the same key, on the same ports if they are still free, and dials again who was dialled before.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc

from decentral.errors import ListenError, PeerUnreachable, TransportError
from decentral.transport.address_book import AddressBook
from decentral.transport.daemon.child import DaemonProcess, launched
from decentral.transport.daemon.control import Control
from decentral.transport.daemon.options import DaemonOptions, KeyFile
from decentral.transport.daemon.reservation_watch import Placeless, until_placed, until_worth_a_restart
from decentral.transport.listen import check_listen, pinned
from decentral.transport.relay_questions import grants_little
from decentral.wire.keys import PeerId, peer_name

_LOOK_EVERY = 5.0  # s between looks at the daemon's addresses: relays and NATs change them
_LISTEN_POLL = 0.02  # s between questions to a daemon that does not listen yet
_FIRST_ATTEMPTS = 3  # one may be killed while it starts; what is wrong with all three is for the user to mend
_STINGY = 6  # starts for the sake of the limits; then a useless relay is better than no peer
_LONGEST_PAUSE = 30.0  # s between attempts to start a daemon again

logger = logging.getLogger("decentral.transport")

Prepare = Callable[[Control], Awaitable[None]]


class Supervisor:
    """Of one peer's daemon. ``known`` are those that a new daemon dials again."""

    def __init__(self, identity: KeyFile, listen: tuple[str, ...], options: DaemonOptions, known: AddressBook) -> None:
        self.starts = 0  # daemons started so far; grows when one died
        self.pid: int | None = None  # of the newest
        self._named: Sequence[str] = ()  # the addresses that it says it has
        self._unnamed: Sequence[str] = ()  # places that it has besides: see placeless
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
                async with self._one_daemon(group, control, prepare) as child:
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
    def found(self) -> tuple[str, ...]:
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
    async def _one_daemon(
        self, group: anyio.abc.TaskGroup, control: Control, prepare: Prepare
    ) -> AsyncIterator[DaemonProcess]:
        arguments = self._arguments(control.socket)
        Path(control.socket).unlink(missing_ok=True)  # a killed daemon leaves its socket behind
        timeout, watcher = self._options.start_timeout, self._options.watcher
        async with launched(arguments, group, timeout=timeout, watcher=watcher) as child, control.held():
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
        """The addresses of before, or others of their kind when somebody took those meanwhile."""
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
        self._pinned = pinned(self._listen, found)
        self.starts += 1
        self.pid = child.pid
        self._down = anyio.Event()
        self._up.set()

    async def _listening(self, control: Control) -> tuple[PeerId, list[str]]:
        """Who the daemon is and where it listens: it answers a moment before it does, with no address at all, and an
        invite made then would lead nowhere.
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
            await anyio.sleep(_LOOK_EVERY)
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
