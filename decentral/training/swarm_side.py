"""The swarm as an outer loop sees it: beside it on one event loop, or from a training thread of its own."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

import anyio
import anyio.abc
from anyio.from_thread import BlockingPortal

from decentral.errors import DecentralError, first_of
from decentral.node.node import END_TIMEOUT, Node
from decentral.rounds.local_state import CommittedUpdate
from decentral.swarm.directory import Directory
from decentral.transport import Transport

# ---- the swarm, as a loop sees it ----
#
# The loop is written once, as coroutines. Beside a node on one event loop they are awaited (`SameLoop`). On the
# training thread every await blocks the thread instead of suspending, so one ``send`` runs a coroutine to its end.

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class PendingResult(Protocol[T_co]):
    """Result of work that was begun on the swarm's loop, and goes on whether or not anybody waits for it."""

    def done(self) -> bool:
        """Tell whether ``result`` need not wait."""
        ...

    async def result(self, within: float | None = None) -> T_co:
        """Return the work's result, or raise its error; TimeoutError after ``within`` seconds."""
        ...


class SwarmSide(Protocol):
    """The side on which rounds are made. Plain attributes of ``node`` may be read; all else is asked of its loop."""

    @property
    def node(self) -> Node:
        """The node that takes part for this loop."""
        ...

    @property
    def alive(self) -> bool:
        """True while commits can still come."""
        ...

    @property
    def has_updates(self) -> bool:
        """True when commits wait, be it their time or not."""
        ...

    async def next_update(self, within: float, is_time: IsTime) -> CommittedUpdate | None:
        """Take the next commit, in order, if ``is_time`` says so of it; None when it is not there in time, or early."""
        ...

    def begin(self, work: Callable[..., Awaitable[T]], *args: Any) -> PendingResult[T]:
        """Run ``work(*args)`` on the swarm's loop; do not wait."""
        ...

    async def call(self, work: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run ``work(*args)`` on the swarm's loop and wait for its result."""
        ...


class AcrossThreads:
    """The swarm side of a loop whose thread is not the swarm's: what it awaits blocks, and never suspends."""

    def __init__(self, thread: SwarmThread[Node]) -> None:
        self._thread = thread

    @property
    def node(self) -> Node:
        """The node that takes part for this loop."""
        return self._thread.node

    @property
    def alive(self) -> bool:
        """True while the swarm's thread runs."""
        return self._thread.alive

    @property
    def has_updates(self) -> bool:
        """True when commits wait."""
        return not self._thread.updates.empty()

    async def next_update(self, within: float, is_time: IsTime) -> CommittedUpdate | None:
        """Take the next commit if it is time."""
        try:
            return self._thread.updates.get(is_time, within if self.alive else None)
        except queue.Empty:
            return None

    def begin(self, work: Callable[..., Awaitable[T]], *args: Any) -> PendingResult[T]:
        """Run it on the swarm's loop; do not wait."""
        return _BegunThere(self._thread.begin(work, *args))

    async def call(self, work: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run it on the swarm's loop, and wait for its result."""
        return self._thread.call(work, *args)


class _BegunThere(PendingResult[T]):
    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    async def result(self, within: float | None = None) -> T:
        return self._future.result(within)


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that awaits nothing but what blocks, on the thread that calls."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise AssertionError(f"{coroutine!r} suspended: nobody would ever go on with it")


# ---- the event loop on a thread ----
#
# There are two doors between the swarm's thread and the training thread.
#
# In: ``call`` and ``begin`` run a coroutine function on the loop. Out: a queue of updates, in commit order. The
# training thread never touches a socket, the loop never touches the model.

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
        """True once the node is there; another thread may ask before it is."""
        return self._node is not None

    @property
    def error(self) -> BaseException | None:
        """The error that ended the loop, if it did not end because it was asked to."""
        return self._error

    @property
    def alive(self) -> bool:
        """True while the loop still runs."""
        return self._thread.is_alive()

    def reason(self) -> BaseException:
        """Say why the loop ended; wait a while for one that is about to."""
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


# ---- commits that wait to be merged ----
#
# This is the one queue of commits that are not in the live model yet, from the swarm to the training loop: in order,
# bounded.
#
# A commit waits here until the loop takes it, and the loop may leave the oldest where it is until its time has come. A
# training loop that stands still (paused, suspended, debugged) must not pile up one pair of tensors per commit: two
# commits that passed this peer by on the same fragment are one move of the anchor, from before the first to after the
# second.

MOST_APART = 32  # updates kept apart

IsTime = Callable[[CommittedUpdate], bool]  # whether a commit may be merged by now


class Backlog:
    """A queue of updates that folds what it can once it is long."""

    def __init__(self) -> None:
        self._waiting: deque[CommittedUpdate] = deque()
        self._came = threading.Condition()

    def put(self, update: CommittedUpdate) -> None:
        """Add the newest commit."""
        with self._came:
            if len(self._waiting) >= MOST_APART:
                update = self._fold(update)
            self._waiting.append(update)
            self._came.notify()

    def get(self, is_time: IsTime, timeout: float | None = None) -> CommittedUpdate:
        """Take the oldest if ``is_time`` says so of it; raises queue.Empty where there is none, or it is too early,
        for ``timeout`` seconds; at once when that is None.
        """
        with self._came:
            if not self._came.wait_for(lambda: self.has_one(is_time), timeout or 0):
                raise queue.Empty
            return self._waiting.popleft()

    def drain(self) -> list[CommittedUpdate]:
        """Take all, oldest first."""
        with self._came:
            taken = list(self._waiting)
            self._waiting.clear()
            return taken

    def has_one(self, is_time: IsTime) -> bool:
        """Tell whether ``get`` need not wait."""
        return bool(self._waiting) and is_time(self._waiting[0])

    def empty(self) -> bool:
        """Tell whether nothing waits."""
        return not self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def _fold(self, newest: CommittedUpdate) -> CommittedUpdate:
        """Join ``newest`` with the last one on its fragment, if neither took progress of this peer's."""
        if _is_of_this_peer(newest):
            return newest
        for at in range(len(self._waiting) - 1, -1, -1):
            older = self._waiting[at]
            if older.before_N is None or (older.fragment == newest.fragment and newest.before_N is not None):
                if _is_of_this_peer(older):
                    return newest
                del self._waiting[at]
                return newest if older.before_N is None else _join(older, newest)
        return newest


def _is_of_this_peer(update: CommittedUpdate) -> bool:
    """Tell whether it took progress of this peer's: it is merged by itself."""
    return update.contribution is not None or update.took or update.taken_N is not None


def _join(older: CommittedUpdate, newest: CommittedUpdate) -> CommittedUpdate:
    """Make one move of both. They meet, unless a branch was given up in between: what is owed since then is the gap."""
    before_N = older.before_N
    assert before_N is not None
    if older.after_N is not None and newest.before_N is not None and older.after_N is not newest.before_N:
        before_N = before_N + (newest.before_N - older.after_N)
    owed, rounds = older.reclaimed_steps + newest.reclaimed_steps, older.rounds + newest.rounds
    channels, adopted = older.channels | newest.channels, older.adopted or newest.adopted
    parted = min((one.parted for one in (older, newest) if one.parted is not None), default=None)
    return replace(
        newest,
        before_N=before_N,
        reclaimed_steps=owed,
        rounds=rounds,
        channels=channels,
        adopted=adopted,
        parted=parted,
    )


# ---- a loop beside the node ----
#
# The outer loop is a task on the node's own event loop, as in a simulation.


class Updates(Backlog):
    """A backlog that a task can wait for."""

    def __init__(self) -> None:
        super().__init__()
        self._news = anyio.Event()

    def put(self, update: CommittedUpdate) -> None:
        """Add the newest commit."""
        super().put(update)
        self._news.set()
        self._news = anyio.Event()

    async def next(self, within: float, is_time: IsTime) -> CommittedUpdate | None:
        """Take the oldest if ``is_time`` says so of it; None when there is no such one within so many seconds."""
        if within and not self.has_one(is_time):
            with anyio.move_on_after(within):
                await self._news.wait()
        try:
            return self.get(is_time)
        except queue.Empty:
            return None


class SameLoop:
    """The swarm side of a task beside ``node``. Work that is begun runs in ``group``, so that it outlives the wait."""

    alive = True  # as long as anybody can ask

    def __init__(self, node: Node, updates: Updates, group: anyio.abc.TaskGroup) -> None:
        self.node, self._updates, self._group = node, updates, group

    @property
    def has_updates(self) -> bool:
        """True when commits wait."""
        return not self._updates.empty()

    async def next_update(self, within: float, is_time: IsTime) -> CommittedUpdate | None:
        """Take the next commit if it is time."""
        return await self._updates.next(within, is_time)

    def begin(self, work: Callable[..., Awaitable[T]], *args: Any) -> PendingResult[T]:
        """Run it on the swarm's loop; do not wait."""
        begun: _BegunHere[T] = _BegunHere()
        self._group.start_soon(begun.run, work, *args)
        return begun

    async def call(self, work: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run it on the swarm's loop, and wait for its result."""
        return await self.begin(work, *args).result()


class _BegunHere(PendingResult[T]):
    def __init__(self) -> None:
        self._ended = anyio.Event()
        self._results: list[T] = []
        self._error: DecentralError | None = None

    async def run(self, work: Callable[..., Awaitable[T]], *args: Any) -> None:
        """Do the work, and keep errors that a caller can do something about; others end the group."""
        try:
            self._results.append(await work(*args))
        except DecentralError as error:
            self._error = error
        finally:
            self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set()

    async def result(self, within: float | None = None) -> T:
        if not self.done():
            with anyio.fail_after(within):
                await self._ended.wait()
        if self._error is not None:
            raise self._error
        if not self._results:
            raise CancelledError
        return self._results[0]
