"""The swarm's event loop on a thread of its own, and the only two doors between it and the training thread.

In: ``call`` and ``start`` run a coroutine function on the loop. Out: a queue of updates, in commit order. The
training thread never touches a socket, the loop never touches the model.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, TypeVar

import anyio
from anyio.from_thread import BlockingPortal

from decentral.errors import DecentralError, first_of
from decentral.node.node import END_TIMEOUT, Node
from decentral.rounds.local_state import CommittedUpdate
from decentral.swarm.directory import Directory
from decentral.training.swarm.backlog import Backlog
from decentral.transport import Transport

T = TypeVar("T")
N = TypeVar("N", bound=Node)

logger = logging.getLogger("decentral.swarm")

STOP_TIMEOUT = 8.0  # s for goodbye and shutdown: one Ctrl-C leaves within 10 s


class LoopEnded(RuntimeError):
    """Asked of a loop that has ended, or is about to: `SwarmThread.reason` tells why."""


class SwarmThread(Generic[N]):
    """Runs one node on one transport until ``stop``, and ``beside`` it, while it joins already, what finds others."""

    def __init__(
        self,
        transport: Transport,
        make_node: Callable[[Callable[[CommittedUpdate], None]], N],
        beside: Callable[[Directory], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self.transport, self._beside = transport, beside
        self.updates = Backlog()
        self._make_node: Callable[..., N] | None = make_node  # once: it may hold the model that the node begins with
        self._node: N | None = None
        self._portal: BlockingPortal | None = None
        self._stop: anyio.Event | None = None
        self._ready = threading.Event()
        self._given_up = threading.Event()  # whoever started it wants it no more, wherever it is
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="swarm", daemon=True)

    @property
    def node(self) -> N:
        """The node; it belongs to the loop's thread, but plain attributes may be read."""
        assert self._node is not None
        return self._node

    @property
    def has_node(self) -> bool:
        """Whether the node is there; another thread may ask before it is."""
        return self._node is not None

    @property
    def error(self) -> BaseException | None:
        """What ended the loop, if it did not end because it was asked to."""
        return self._error

    @property
    def alive(self) -> bool:
        """Whether the loop still runs."""
        return self._thread.is_alive()

    def reason(self) -> BaseException:
        """Why the loop ended; waits a while for one that is about to."""
        self._thread.join(STOP_TIMEOUT)
        return self._error or DecentralError("the swarm's thread ended; see events.jsonl, then restart")

    def start(self) -> None:
        """Start and wait until training may begin. Raises what joining raised."""
        self._thread.start()
        while not self._ready.wait(0.2):  # short waits: Ctrl-C must get through on every platform
            if not self._thread.is_alive():
                break
        if self._error is not None:
            raise self._error

    def call(self, work: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run ``work(*args)`` on the loop and wait for its result. Raises LoopEnded; CancelledError where it ends
        before the result is there.
        """
        if self._portal is None:
            raise RuntimeError("the swarm's loop is not up yet")
        return self._begun(work, *args).result()

    def begin(self, work: Callable[..., Awaitable[T]], *args: Any) -> Future[T]:
        """Run ``work(*args)`` on the loop; do not wait. Raises LoopEnded."""
        return self._begun(work, *args)

    def _begun(self, work: Callable[..., Awaitable[T]], *args: Any) -> Future[T]:
        assert self._portal is not None
        try:
            return self._portal.start_task_soon(work, *args)
        except RuntimeError as error:
            raise LoopEnded(str(error)) from None

    def tell(self, work: Callable[..., Awaitable[T]], *args: Any) -> None:
        """Run ``work(*args)`` on the loop, or not at all when that has ended: who asks may not know yet."""
        if self._portal is not None:
            with suppress(RuntimeError):
                self._portal.start_task_soon(work, *args)

    def stop(self, *, politely: bool) -> None:
        """Leave (saying goodbye when ``politely``) and end the loop, the transport and its daemon."""
        self._given_up.set()  # it may not have come so far that it could be told
        if not self._thread.is_alive():
            return
        if not self._ready.is_set():  # it joins still: nobody knows it, and nothing is to be said
            politely = False
        with suppress(RuntimeError):  # the loop ended meanwhile
            if self._portal is not None:
                self._portal.start_task_soon(self._leave, politely)
        self._thread.join(END_TIMEOUT + STOP_TIMEOUT + 4)

    # ---- on the swarm's thread ----

    def _run(self) -> None:
        try:
            anyio.run(self._main, backend="asyncio")  # not uvloop: with a DataLoader beside, it misses the daemon's end
        except BaseExceptionGroup as group:
            self._error = first_of(group)
        except BaseException as error:  # noqa: BLE001 - carried to the training thread, which raises it
            self._error = error
        finally:
            self._ready.set()

    async def _main(self) -> None:
        make_node, self._make_node = self._make_node, None
        assert make_node is not None
        self._node = make_node(self.updates.put)
        del make_node
        self._stop = anyio.Event()
        if self._given_up.is_set():
            return
        async with BlockingPortal() as portal:
            self._portal = portal
            async with self.transport, anyio.create_task_group() as group:
                if self._beside is not None:
                    group.start_soon(self._beside, self._node.directory)
                group.start_soon(self._end, group.cancel_scope)
                if self._given_up.is_set():
                    self._stop.set()
                await group.start(self._node.run)
                self._ready.set()
                await anyio.sleep_forever()
            await portal.stop(cancel_remaining=True)

    async def _end(self, scope: anyio.CancelScope) -> None:
        """All of it once it is asked for, while the node still joins, too."""
        assert self._stop is not None
        await self._stop.wait()
        scope.cancel()

    async def _leave(self, politely: bool) -> None:
        assert self._node is not None
        assert self._stop is not None
        try:
            if politely:
                await self._node.see_others_to_the_end()
                with anyio.move_on_after(STOP_TIMEOUT):
                    await self._node.leave()
        except Exception as error:  # nobody waits for this task's result
            logger.error("leaving failed (%s: %s); others may wait until its lease ends", type(error).__name__, error)
            logger.debug("leaving failed", exc_info=True)
        finally:
            self._stop.set()
