"""Signals that end a training loop politely: with a goodbye to the others and a checkpoint.

SIGTERM and SIGHUP ask the peer to leave, as ``peer.leave()`` does: ``done`` is true at the next boundary. Ctrl-C stays
what Python makes of it, a KeyboardInterrupt, and is heard at the end of an ``optimizer.step`` that it falls into: half
a step is in no checkpoint. A second signal is heard at once.

Who handled a signal before is called, too, at the end of such a step. Where nobody did, Python would have ended the
process there: it ends once the peer has left, with the code that shells give that, 128 + signal. What is ignored
(``nohup``) stays ignored.

No signal is handled amid an import's own bookkeeping, but a moment later: an exception that is raised there, in Python
3.11, leaves a lock behind that every other thread's next import waits for. An import that stays there, as it waits for
another thread, holds a signal back for some seconds and no longer.
"""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Self

ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
# Not another one: timeout(1) sends SIGTERM to its child and then to the child's group, which is the child again.
ONE_SIGNAL = 0.1  # s
# Steps that may begin after it on a process that does not talk to the swarm: the others' boundary may have begun.
STEPS_TO_HEAR = 2
IMPORTS = "<frozen importlib._bootstrap>"  # the file of what takes the locks of imports; modules' own code is elsewhere
UNTIL_AGAIN = 0.02  # s
HELD_BACK = 5.0  # s, at most


def drop_closed_terminal() -> None:
    """Send to nowhere what would be written to a terminal that has closed: it would fail, in the middle of leaving."""
    for descriptor in (1, 2):
        with suppress(OSError):
            is_closed = stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor)
            if is_closed:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)


def _send_to_main_thread(number: int) -> None:
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, number)  # it hears that amid any waiting, too
    else:
        signal.raise_signal(number)


class StopSignals:
    """Handles them for one peer, inside its ``with`` block, on the main thread; on any other it does nothing.

    Args:
        leave: asks the peer to leave; called inside a handler.
        hurry: called where Ctrl-C is held back until the step ends: nothing is to be waited for.
        is_held: whether a step is under way, and not in a place where it may be cut off.
    """

    def __init__(self, leave: Callable[[], None], hurry: Callable[[], None], is_held: Callable[[], bool]) -> None:
        self._leave, self._hurry, self._is_held = leave, hurry, is_held
        self._before: dict[int, signal.Handlers | Callable[[int, FrameType | None], object]] = {}
        self._here = os.getpid()
        self._heard: dict[int, float] = {}  # by signal, monotonic s
        self._held: list[int] = []  # to be handled when the step is over
        self._importing: dict[int, float] = {}  # monotonic s since which a signal is held back, by signal
        self._steps_since = 0
        self._is_polite = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, *ENDING):
                before = signal.getsignal(number)
                # None: of a library that is not Python's. Who lets Ctrl-C end the process at once has asked for that.
                if before in (None, signal.SIG_IGN) or (number == signal.SIGINT and before == signal.SIG_DFL):
                    continue
                self._before[number] = before  # type: ignore[assignment]  # typeshed has it as an int, too
                signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:  # somebody else's is left alone
                signal.signal(number, before)

    @property
    def code(self) -> int | None:
        """The code to end the process with, where a signal came that would have ended it; else None."""
        ends = (number for number in self._heard if self._ends_the_process(number))
        return next((128 + number for number in ends), None)

    def politely(self) -> None:
        """The peer takes part, and can be asked to leave: until then a signal ends the process at once."""
        self._is_polite = True

    def step_begins(self, *, done: bool) -> None:
        """SystemExit for a loop that trains on although it was told to leave."""
        self._held.clear()  # of a step that was cut off, and the loop went on
        self._heard.pop(signal.SIGINT, None)
        if self.code is not None:
            self._steps_since += 1
            if done or self._steps_since > STEPS_TO_HEAR:
                raise SystemExit(self.code)

    def step_ends(self) -> None:
        """Handle what came within the step."""
        while self._held:
            self._pass_on(self._held.pop(0), None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._here:  # a worker that was forked
            self._in_a_worker(number, frame)
            return
        now, last = time.monotonic(), self._heard.get(number)
        is_amid_import = frame is not None and frame.f_code.co_filename == IMPORTS
        if is_amid_import and now < self._importing.setdefault(number, now) + HELD_BACK:
            threading.Timer(UNTIL_AGAIN, _send_to_main_thread, [number]).start()
            return
        self._importing.pop(number, None)
        drop_closed_terminal()
        if last is not None and self._ends_the_process(number) and self._says_nothing_new(number, now - last):
            return
        again, self._heard[number] = last is not None, now
        if not self._is_polite or again:
            self._pass_on(number, frame, at_once=True)
            return
        (self._hurry if number == signal.SIGINT else self._leave)()
        if self._is_held():
            self._held.append(number)
        else:
            self._pass_on(number, frame)

    def _pass_on(self, number: int, frame: FrameType | None, *, at_once: bool = False) -> None:
        if number == signal.SIGINT:
            del self._heard[number]  # a loop may catch what comes of it, and go on
        before = self._before[number]
        if callable(before):
            before(number, frame)
        elif at_once:
            raise SystemExit(128 + number)

    def _in_a_worker(self, number: int, frame: FrameType | None) -> None:
        before = self._before[number]
        if callable(before):
            before(number, frame)
        elif number == signal.SIGTERM:  # a terminal that closes tells all its processes, and ours ends its workers
            signal.signal(number, before)
            os.kill(os.getpid(), number)

    def _ends_the_process(self, number: int) -> bool:
        return self._before.get(number) == signal.SIG_DFL

    def _says_nothing_new(self, number: int, since: float) -> bool:
        """A terminal that closes says so more than once: the shell does, and the kernel."""
        return number != signal.SIGTERM or since < ONE_SIGNAL
