"""The one queue of commits that are not in the live model yet, from the swarm to the training loop: in order, bounded.

A commit waits here until the loop takes it, and the loop may leave the oldest where it is until its time has come. A
training loop that stands still (paused, suspended, debugged) must not pile up one pair of tensors per commit: two
commits that passed this peer by on the same fragment are one move of the anchor, from before the first to after the
second.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from decentral.rounds.local_state import CommittedUpdate

LIMIT = 32  # updates kept apart

IsTime = Callable[[CommittedUpdate], bool]  # whether a commit may be merged by now


class Backlog:
    """A queue of updates that folds what it can once it is long."""

    def __init__(self) -> None:
        self._waiting: deque[CommittedUpdate] = deque()
        self._came = threading.Condition()

    def put(self, update: CommittedUpdate) -> None:
        """Add the newest commit."""
        with self._came:
            if len(self._waiting) >= LIMIT:
                update = self._folded(update)
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
        """Whether ``get`` need not wait."""
        return bool(self._waiting) and is_time(self._waiting[0])

    def empty(self) -> bool:
        """Whether nothing waits."""
        return not self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def _folded(self, newest: CommittedUpdate) -> CommittedUpdate:
        """``newest`` joined with the last one on its fragment, if neither took progress of this peer's."""
        if _is_of_this_peer(newest):
            return newest
        for at in range(len(self._waiting) - 1, -1, -1):
            older = self._waiting[at]
            if older.before_N is None or (older.fragment == newest.fragment and newest.before_N is not None):
                if _is_of_this_peer(older):
                    return newest
                del self._waiting[at]
                return newest if older.before_N is None else _joined(older, newest)
        return newest


def _is_of_this_peer(update: CommittedUpdate) -> bool:
    """Whether it took progress of this peer's: it is merged by itself."""
    return update.contribution is not None or update.took or update.taken_N is not None


def _joined(older: CommittedUpdate, newest: CommittedUpdate) -> CommittedUpdate:
    """Both moves as one. They meet, unless a branch was given up in between: what is owed since then is the gap."""
    before_N = older.before_N
    assert before_N is not None
    if older.after_N is not None and newest.before_N is not None and older.after_N is not newest.before_N:
        before_N = before_N + (newest.before_N - older.after_N)
    owed, rounds = older.owed_steps + newest.owed_steps, older.rounds + newest.rounds
    channels, adopted = older.channels | newest.channels, older.adopted or newest.adopted
    return replace(newest, before_N=before_N, owed_steps=owed, rounds=rounds, channels=channels, adopted=adopted)
