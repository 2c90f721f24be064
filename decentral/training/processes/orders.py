"""What the main process has the others of its peer do: it gives orders, they follow until it lets them go.

Between two orders the main process talks to the swarm, for as long as that takes. The others wait inside ``follow``
for its next word, and Ctrl-C waits with them: else one process would leave in the middle of what all do together.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import IntEnum
from types import FrameType

import torch

from decentral import errors
from decentral.errors import DecentralError
from decentral.training.processes.group import MAIN, Processes

TO_MEET = 5.0  # s: after Ctrl-C, in which all processes must be between two steps for a last checkpoint


class Order(IntEnum):
    """Each with one number, of a fragment say."""

    GO_ON = 0  # what the boundary brought follows, and training goes on
    LEAVE = 1  # the main process is leaving its block: 1 after Ctrl-C
    FAIL = 2  # an error ended the boundary on the main process: its name and message follow
    MEET = 3  # answer
    READ = 4  # give your part of a fragment
    WRITE = 5  # take it
    FROZEN = 6  # give your part of what is not trained
    KEEP = 7  # give your part of the inner optimizer's state, and what else is yours
    RESTORE = 8  # take it


ENDS = (Order.GO_ON, Order.LEAVE)


class Orders:
    """One peer's; on the main process ``give``, on the others ``follow``."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self.over = False  # the main process has let the others go for good, or failed
        self.interrupted = False  # by Ctrl-C
        self._what: dict[Order, Callable[[int], object]] = {}

    def means(self, what: Mapping[Order, Callable[[int], object]]) -> None:
        """What the others do at an order."""
        self._what.update(what)

    def give(self, order: Order, number: int = 0) -> None:
        """From the main process to all others, which wait for it."""
        self.over = self.over and order != Order.GO_ON  # a loop may catch an error, and go on
        self.processes.tell([order, number])

    def follow(self, *, within: float | None = None) -> Order:
        """Do what the main process says until it ends that: by which order. TimeoutError: it said nothing ``within``
        seconds. Raises the error that ended the boundary there.
        """
        with undisturbed():
            while True:
                order, number = self.processes.tell([0, 0], within=within)
                within = None
                if order in ENDS:
                    self.over, self.interrupted = order == Order.LEAVE, bool(number)
                    return Order(order)
                if order == Order.FAIL:
                    self.over = True
                    self._raise(self.processes.tell_bytes(b"").decode())
                if order == Order.MEET:
                    self.processes.send(torch.zeros(1), MAIN)
                else:
                    self._what[Order(order)](number)

    def meet(self) -> bool:
        """On the main process, after Ctrl-C: whether all others follow. Else one is inside what it cannot leave."""
        try:
            self.give(Order.MEET)
            for rank in range(1, self.processes.size):
                self.processes.receive(torch.zeros(1), rank, within=TO_MEET)
        except (TimeoutError, DecentralError):
            return False
        return True

    def let_go(self, *, interrupted: bool) -> None:
        """On the main process, which is leaving: nothing more is asked of the others. Those that are gone are gone."""
        if not self.over:
            self.over = True
            with suppress(DecentralError):
                self.give(Order.LEAVE, int(interrupted))

    def fail(self, error: Exception) -> None:
        """On the main process: have the others raise the same, so that no one trains on, or waits, alone."""
        if self.over or isinstance(error, errors.ProcessLost):
            return
        self.over = True
        with suppress(DecentralError):
            self.give(Order.FAIL)
            self.processes.tell_bytes(f"{type(error).__name__}: {error}".encode())

    def _raise(self, told: str) -> None:
        name, _, message = told.partition(": ")
        if name in errors.__all__:
            kind: type[DecentralError] = getattr(errors, name)
            raise kind(message)
        raise DecentralError(f"the main process of this peer failed ({told}); see its last lines")


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C is heard at the end of the block, by whoever hears it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = []

    def hear(number: int, frame: FrameType | None) -> None:
        heard.append(number)

    before = signal.signal(signal.SIGINT, hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if heard:
        signal.raise_signal(signal.SIGINT)
