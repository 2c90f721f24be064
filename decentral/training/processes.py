"""Processes that are one peer: the bytes between them, the orders that they follow, the parameters they share out."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import IntEnum
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import psutil
import torch
import torch.distributed as dist  # noqa: TID251  # the one place beside accelerate
from torch import Tensor, nn

from decentral import errors
from decentral.errors import ConfigError, DecentralError, ProcessLost
from decentral.parameters import Fragment, split
from decentral.parameters.schema import Box, boxes_of, holders, is_sharded, local_part
from decentral.tensors.memory import fresh

# ---- bytes between processes ----
#
# They have a process group of their own, so nothing else mixes with it.
#
# On the processor (gloo), whatever the model trains on: the anchor is there too, and a process that ends closes its
# connections, so that the others learn of it at once and fail as well, instead of waiting.

MAIN = 0  # the rank that talks to the swarm
# The main process may look for company that long while the others wait for its word. One that has died is seen at once.
PATIENCE = timedelta(days=7)


def count_launched() -> int:
    """Count processes that torchrun, or whoever began torch.distributed, started with this one; 1: it is alone."""
    given = os.environ.get("WORLD_SIZE", "1")
    begun = dist.is_available() and dist.is_initialized()
    return max(int(given) if given.isdecimal() else 1, dist.get_world_size() if begun else 1)


class Processes:
    """This process among those of its peer. All of them make it at the same moment."""

    def __init__(self) -> None:
        if not dist.is_initialized():
            raise ConfigError("join(accelerator=...): it has several processes, and torch.distributed has not begun")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        with _as_one():
            self._group = dist.new_group(backend="gloo", timeout=PATIENCE)

    @property
    def is_main(self) -> bool:
        """True on the process that talks to the swarm."""
        return self.rank == MAIN

    def tell(self, numbers: Sequence[int], *, within: float | None = None) -> list[int]:
        """Give all the main process's numbers, whole and below 2**63, of which each gives as many. TimeoutError after
        ``within`` seconds: then no more can be said.
        """
        told = torch.tensor(list(numbers), dtype=torch.int64, device="cpu")
        self._wait(self._broadcast(told), within)
        return [int(number) for number in told]

    def tell_bytes(self, data: bytes) -> bytes:
        """Give all the main process's bytes; the others give anything."""
        (nbytes,) = self.tell([len(data)])
        told = torch.frombuffer(bytearray(data), dtype=torch.uint8) if self.is_main and data else fresh(0)
        told = told if self.is_main else torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        if nbytes:
            self._wait(self._broadcast(told), None)
        return told.numpy().tobytes() if nbytes else b""

    def any_of(self, found: list[int]) -> list[int]:
        """Tell which of the truth values are true on some process; all give as many."""
        mine = torch.tensor(found, dtype=torch.int64, device="cpu")
        for rank in range(1, self.size):
            if self.is_main:
                theirs = torch.empty_like(mine)
                self.receive(theirs, rank)
                mine |= theirs
            elif self.rank == rank:
                self.send(mine, MAIN)
        return self.tell(mine.tolist())

    def broadcast(self, tensor: Tensor) -> None:
        """Write the main process's values into the tensor of every other one; contiguous, on the processor."""
        if tensor.numel():
            self._wait(self._broadcast(_bytes_of(tensor)), None)

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a tensor's values, from wherever it is."""
        self.begin_send(tensor, to)()

    def begin_send(self, tensor: Tensor, to: int) -> Callable[[], None]:
        """Begin to send them; call the result to wait until that is done, and leave the tensor as it is before."""
        data = _bytes_of(tensor.detach().cpu().contiguous())
        with _as_one():
            work = dist.isend(data, to, group=self._group)
        return lambda: self._wait(work, None, data)

    def receive(self, into: Tensor, sender: int, *, within: float | None = None) -> None:
        """Receive a tensor of that shape and dtype, which ``sender`` sends next; contiguous, on the processor."""
        self.begin_receive(into, sender, within=within)()

    def begin_receive(self, into: Tensor, sender: int, *, within: float | None = None) -> Callable[[], None]:
        """Begin to receive it; call the result to wait until it is there."""
        with _as_one():
            work = dist.irecv(_bytes_of(into), sender, group=self._group)
        return lambda: self._wait(work, within)

    def _broadcast(self, tensor: Tensor) -> Any:  # Any: torch has no type for it
        with _as_one():
            return dist.broadcast(tensor, MAIN, group=self._group, async_op=True)

    def _wait(self, work: Any, within: float | None, held: Tensor | None = None) -> None:
        """``held``: what must not be freed before."""
        if within is None:
            with _as_one():
                work.wait()
            return
        try:
            work.wait(timedelta(seconds=within))
        except RuntimeError as error:
            raise TimeoutError("the other processes of this peer are elsewhere") from error


@contextmanager
def _as_one() -> Iterator[None]:
    """Turn what torch says of a process that is gone into one line."""
    try:
        yield
    except RuntimeError as error:
        raise ProcessLost(
            f"another process of this peer has ended ({str(error).splitlines()[0][:120]}), and they train as one; see "
            "its last lines, then start all of them again with the same folder"
        ) from error


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


# ---- a launcher that started one ----
#
# accelerate launch starts one process where it finds no accelerator, whatever it was asked for, and says nothing.


def warn_if_alone() -> str:
    """Warn one process whose launcher was asked for several; empty for any other."""
    if count_launched() > 1:
        return ""
    with suppress(psutil.Error, OSError):
        wanted = _count_processes(psutil.Process(os.getppid()).cmdline())
        if wanted > 1:
            line = f"ACCELERATE_USE_CPU=true torchrun --standalone --nproc_per_node {wanted}"
            return (
                f"accelerate launch was asked for {wanted} processes, and this is the only one that it started, as it "
                f"does without a GPU; {line} starts all of them"
            )
    return ""


def _count_processes(command: Sequence[str]) -> int:
    """Count processes that this command line of accelerate's launcher asks for; 0 for another command."""
    is_launcher = any(Path(word).name in ("accelerate-launch", "launch.py") for word in command[:3])
    is_launcher |= any(Path(one).name == "accelerate" and two == "launch" for one, two in pairwise(command[:4]))
    is_launcher |= "accelerate.commands.launch" in command[:4]
    words = [part for word in command for part in word.split("=", 1)] if is_launcher else []
    given = (two for one, two in pairwise(words) if one in ("--num_processes", "--num-processes"))
    return next((int(number) for number in given if number.isdecimal()), 0)


# ---- orders of the main process ----
#
# It gives them, and the others follow until it lets them go.
#
# Between two orders the main process talks to the swarm, for as long as that takes. The others wait inside ``follow``
# for its next word, and Ctrl-C waits with them: else one process would leave in the middle of what all do together.

TO_MEET = 5.0  # s: after Ctrl-C or an error, in which all processes must be between two steps for a last checkpoint


class Order(IntEnum):
    """Orders of the main process, each with one number, of a fragment say."""

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
    """Orders of one peer: the main process gives them with ``give``, the others ``follow``."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self.over = False  # the main process has let the others go for good, or failed
        self.interrupted = False  # by Ctrl-C
        self.steps = 0  # inner steps of the peer that this process has made
        self._what: dict[Order, Callable[[int], object]] = {}

    def means(self, what: Mapping[Order, Callable[[int], object]]) -> None:
        """Set the work that the others do at orders."""
        self._what.update(what)

    def give(self, order: Order, number: int = 0) -> None:
        """Send an order from the main process to all others, which wait for it."""
        self.over = self.over and order != Order.GO_ON  # a loop may catch an error, and go on
        self.processes.tell([order, number])

    def follow(self, *, within: float | None = None) -> Order:
        """Do what the main process says until it ends that: by which order. TimeoutError: it said nothing ``within``
        seconds. Raises the error that ended the boundary there.
        """
        with hold_interrupts():
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
                    self.processes.send(torch.tensor([self.steps], dtype=torch.int64, device="cpu"), MAIN)
                else:
                    self._what[Order(order)](number)

    def meet(self, *, in_step: bool) -> bool:
        """Tell, on the main process after Ctrl-C or an error, whether all others follow, and, for parts of one model
        that must be ``in_step``, have made as many steps. Else one is inside what it cannot leave.
        """
        theirs = torch.tensor([self.steps] * self.processes.size, dtype=torch.int64, device="cpu")
        try:
            self.give(Order.MEET)
            for rank in range(1, self.processes.size):
                self.processes.receive(theirs[rank : rank + 1], rank, within=TO_MEET)
        except (TimeoutError, DecentralError):
            return False
        return not in_step or bool((theirs == self.steps).all())

    def let_go(self, *, interrupted: bool) -> None:
        """Ask nothing more of the others, as the main process, which leaves. Those that are gone are gone."""
        if not self.over:
            self.over = True
            with suppress(DecentralError):
                self.give(Order.LEAVE, int(interrupted))

    def fail(self, error: Exception) -> None:
        """Have the others raise the main process's error, so that no one trains on, or waits, alone."""
        if self.over or isinstance(error, errors.ProcessLost):
            return
        self.over = True
        with suppress(DecentralError):
            self.give(Order.FAIL)
            self.processes.tell_bytes(f"{type(error).__name__}: {error}".encode())

    def _raise(self, word: str) -> None:
        name, _, message = word.partition(": ")
        if name in errors.__all__:
            kind: type[DecentralError] = getattr(errors, name)
            raise kind(message)
        raise DecentralError(f"the main process of this peer failed ({word}); see its last lines")


class Accelerator(Protocol):
    """accelerate's, as far as a peer asks it: which of the peer's processes this is."""

    @property
    def is_main_process(self) -> bool:
        """True on the process that talks to the swarm."""
        ...

    @property
    def num_processes(self) -> int:
        """Number of processes that this peer has."""
        ...

    @property
    def device(self) -> torch.device:
        """Device on which this process computes."""
        ...

    def unwrap_model(self, model: nn.Module, /) -> nn.Module:
        """Return the model without its wrappers for several processes."""
        ...


class Team:
    """The processes of one peer, seen from this one: the main one leads, and what fails there fails on all of them."""

    def __init__(self, accelerator: Accelerator | None) -> None:
        self._accelerator = accelerator
        self.orders = Orders(Processes()) if self.size > 1 else None

    @property
    def is_main(self) -> bool:
        """True on the process that talks to the swarm."""
        return self._accelerator is None or bool(self._accelerator.is_main_process)

    @property
    def size(self) -> int:
        """Processes of this peer."""
        return 1 if self._accelerator is None else int(self._accelerator.num_processes)

    @property
    def device(self) -> torch.device:
        """Device on which accelerate lets this process compute."""
        assert self._accelerator is not None
        return self._accelerator.device

    def from_main(self, flat: Tensor | None, numel: int) -> Tensor:
        """Give all processes, which all ask, the main one's values."""
        mine = fresh(numel) if flat is None or not flat.numel() else flat.cpu().contiguous()
        if self.orders is not None:
            self.orders.processes.broadcast(mine)
        return mine

    def tell(self, word: bytes) -> bytes:
        """Give all processes, which all ask, the main one's ``word``."""
        if self.orders is None:
            return word
        with hold_interrupts():
            return self.orders.processes.tell_bytes(word)

    def go_on(self) -> Processes:
        """Pass a step boundary together: the others follow the main one's orders until it says that training goes on.

        Raises what `Orders.follow` does, and DecentralError, or KeyboardInterrupt, where the main process leaves.
        """
        assert self.orders is not None
        if self.is_main:
            self.orders.give(Order.GO_ON)
        elif self.orders.follow() is Order.LEAVE:
            if self.orders.interrupted:
                raise KeyboardInterrupt
            raise DecentralError(
                "the main process of this peer left the run, and this one trains on; end the loop on all of them at "
                "once, when peer.done"
            )
        return self.orders.processes

    @contextmanager
    def as_one(self) -> Iterator[None]:
        """Have what fails in the block on the main process fail on the others, which wait for its word meanwhile."""
        try:
            yield
        except Exception as error:
            self.fail(error)
            raise

    def on_main(self, work: Callable[[], object]) -> None:
        """Do it on the main process; what fails there fails on all of them."""
        if self.is_main:
            with self.as_one():
                work()

    def fail(self, error: BaseException | None) -> None:
        """Have the other processes raise the same where they wait for this one's word, if it is the main one."""
        if self.orders is not None and self.is_main and isinstance(error, Exception):
            self.orders.fail(error)

    def let_go(self, *, interrupted: bool) -> None:
        """Ask nothing more of the others: the main process leaves."""
        if self.orders is not None:
            self.orders.let_go(interrupted=interrupted)


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Hold Ctrl-C back to the end of the block, where its handler hears it."""
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


# ---- parameters in parts ----
#
# Every process holds a part of each: they are collected on the main one, and spread from it, piece by piece.
#
# No process but the main one ever holds more than its part, and the main one no more than the fragment that it asked
# for. Each part crosses once, in the dtype that the model has.

# Shape suffix: N = elements of one fragment, flat float32, on the processor of the main process.

PARTS_AHEAD = 8  # parts on their way at once: a process that is woken for each alone waits for the processor each time


class Shards:
    """Every process calls the same method with the same tensor at once; only the main one gives or gets it whole."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes

    def read(self, parameters: Mapping[str, Tensor], fragment: Fragment) -> Tensor:
        """Collect one fragment (N,), on the main process; (0,) elsewhere."""
        flat_N = fresh(fragment.numel if self._processes.is_main else 0)
        pieces = split(flat_N, fragment) if self._processes.is_main else [None] * len(fragment.parameters)
        specs = zip(fragment.parameters, pieces, strict=True)
        _in_turn(end for spec, piece in specs for end in self._collecting(parameters[spec.name], piece))
        return flat_N

    def write(self, flat_N: Tensor, fragment: Fragment, parameters: Mapping[str, Tensor]) -> None:
        """Overwrite one fragment in place; ``flat_N`` is looked at on the main process."""
        pieces = split(flat_N, fragment) if self._processes.is_main else [None] * len(fragment.parameters)
        specs = zip(fragment.parameters, pieces, strict=True)
        _in_turn(end for spec, piece in specs for end in self._spreading(piece, parameters[spec.name]))

    def whole(self, tensor: Tensor) -> Tensor | None:
        """Collect all of a tensor in its own dtype, on the processor; None elsewhere than on the main process."""
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") if self._processes.is_main else None
        _in_turn(self._collecting(tensor, made))
        return made

    def spread(self, source: Tensor | None, tensor: Tensor) -> None:
        """Spread values of the main process, of any dtype, into ``tensor``, on every process its part."""
        _in_turn(self._spreading(source, tensor))

    def _collecting(self, tensor: Tensor, into: Tensor | None) -> Iterator[Callable[[], None]]:
        """Collect ``tensor`` into one of the main process, of any dtype: each step begins when it is asked for, and has
        an end.
        """
        held = local_part(tensor)
        for rank, box in self._holders(tensor).items():
            if into is not None and rank == MAIN:
                box.of(into).copy_(held)
            elif into is not None:
                yield self._receiving(box.of(into), tensor.dtype, rank)
            elif rank == self._processes.rank:
                yield self._processes.begin_send(held, MAIN)

    def _spreading(self, source: Tensor | None, tensor: Tensor) -> Iterator[Callable[[], None]]:
        held = local_part(tensor)
        for rank, box in sorted(self._boxes(tensor).items()):
            if source is not None and box.numel and rank == MAIN:
                held.copy_(box.of(source))
            elif source is not None and box.numel:
                yield self._processes.begin_send(box.of(source).to(tensor.dtype), rank)
            elif box.numel and rank == self._processes.rank:
                yield self._receiving(held, tensor.dtype, MAIN)

    def _receiving(self, part: Tensor, dtype: torch.dtype, sender: int) -> Callable[[], None]:
        """Receive ``part`` where it lies if that can be: new memory costs more than the copy."""
        if part.device.type == "cpu" and part.dtype == dtype and part.is_contiguous():
            return self._processes.begin_receive(part, sender)
        landed = torch.empty(part.shape, dtype=dtype, device="cpu")
        arrives = self._processes.begin_receive(landed, sender)

        def end() -> None:
            arrives()
            part.copy_(landed)

        return end

    def _boxes(self, tensor: Tensor) -> dict[int, Box]:
        """Return each process's box; all of a tensor that is not sharded: FSDP2 leaves some whole, as it is told to."""
        if is_sharded(tensor):
            return boxes_of(tensor)
        return dict.fromkeys(range(self._processes.size), Box((0,) * tensor.dim(), tuple(tensor.shape)))

    def _holders(self, tensor: Tensor) -> dict[int, Box]:
        return holders(self._boxes(tensor))


@torch.no_grad()
def _in_turn(steps: Iterable[Callable[[], None]]) -> None:
    """Begin the steps, and end them in their order, a few at a time."""
    begun: deque[Callable[[], None]] = deque()
    for end in steps:
        begun.append(end)
        if len(begun) > PARTS_AHEAD:
            begun.popleft()()
    while begun:
        begun.popleft()()
