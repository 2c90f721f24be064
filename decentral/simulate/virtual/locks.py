"""Events, locks, semaphores and limiters of anyio under virtual time: first come, first served."""

from __future__ import annotations

from types import TracebackType

from anyio import WouldBlock

from decentral.simulate.virtual.loop import (
    Loop,
    Task,
    cancel_shielded_checkpoint,
    checkpoint,
    checkpoint_if_cancelled,
    pause,
)

__all__ = ["CapacityLimiter", "Event", "Lock", "Semaphore"]


class Event:
    """See anyio.Event."""

    __slots__ = ("_set", "_waiting")

    def __init__(self) -> None:
        self._set = False
        self._waiting: dict[Task, None] = {}

    def is_set(self) -> bool:
        """See anyio.Event."""
        return self._set

    def set(self) -> None:
        """See anyio.Event."""
        if self._set:
            return
        self._set = True
        loop = Loop.current
        for task in self._waiting:
            loop.resume(task)
        self._waiting.clear()

    async def wait(self) -> None:
        """See anyio.Event."""
        if self._set:
            await checkpoint()
            return
        self._waiting[Loop.current.task] = None
        await pause(self._waiting.__delitem__)


class _Held:
    """Something that is acquired and released, and who waits for it."""

    def __init__(self, *, fast_acquire: bool = False) -> None:
        self._fast = fast_acquire
        self._waiting: dict[Task, None] = {}

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    async def acquire(self) -> None:
        """See anyio.Lock."""
        await checkpoint_if_cancelled()
        if not self._take(Loop.current.task):
            self._waiting[Loop.current.task] = None
            await pause(self._waiting.__delitem__)
        elif not self._fast:
            await cancel_shielded_checkpoint()

    def acquire_nowait(self) -> None:
        """See anyio.Lock."""
        if not self._take(Loop.current.task):
            raise WouldBlock

    def release(self) -> None:
        """See anyio.Lock."""
        raise NotImplementedError

    def _take(self, task: Task) -> bool:
        """Whether it is to be had at once, and is taken then."""
        raise NotImplementedError

    def _next(self) -> Task:
        """Who has waited longest, and waits no more."""
        task = next(iter(self._waiting))
        del self._waiting[task]
        Loop.current.resume(task)
        return task


class Lock(_Held):
    """See anyio.Lock."""

    _owner: Task | None = None

    def locked(self) -> bool:
        """See anyio.Lock."""
        return self._owner is not None

    def release(self) -> None:
        """See anyio.Lock."""
        if self._owner is not Loop.current.task:
            raise RuntimeError("can't release a Lock you don't own")
        self._owner = self._next() if self._waiting else None

    def _take(self, task: Task) -> bool:
        if self._owner is task:
            raise RuntimeError("Attempted to acquire an already held Lock")
        if self._owner is not None:
            return False
        self._owner = task
        return True


class Semaphore(_Held):
    """See anyio.Semaphore."""

    def __init__(self, initial_value: int, *, max_value: int | None = None, fast_acquire: bool = False) -> None:
        super().__init__(fast_acquire=fast_acquire)
        self.value, self.max_value = initial_value, max_value

    def release(self) -> None:
        """See anyio.Semaphore."""
        if self._waiting:
            self._next()
        elif self.value == self.max_value:
            raise ValueError("semaphore released too many times")
        else:
            self.value += 1

    def _take(self, task: Task) -> bool:
        if not self.value:
            return False
        self.value -= 1
        return True


class CapacityLimiter(_Held):
    """See anyio.CapacityLimiter."""

    def __init__(self, total_tokens: float) -> None:
        super().__init__()
        self.total_tokens = total_tokens
        self._borrowers: set[Task] = set()

    @property
    def borrowed_tokens(self) -> int:
        """See anyio.CapacityLimiter."""
        return len(self._borrowers)

    def release(self) -> None:
        """See anyio.CapacityLimiter."""
        self._borrowers.remove(Loop.current.task)
        if self._waiting and len(self._borrowers) < self.total_tokens:
            self._borrowers.add(self._next())

    def _take(self, task: Task) -> bool:
        if task in self._borrowers:
            raise RuntimeError("this borrower is already holding one of this CapacityLimiter's tokens")
        if self._waiting or len(self._borrowers) >= self.total_tokens:
            return False
        self._borrowers.add(task)
        return True
