"""The swarm's thread beside whatever the training side does with its process."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from concurrent.futures import CancelledError

import anyio
import pytest

from decentral.errors import VersionError
from decentral.swarm.identity import Identity
from decentral.training.swarm_side import LoopEnded, SwarmThread
from decentral.transport.daemon.transport import DaemonTransport
from decentral.transport.memory import MemoryNetwork
from decentral.wire.keys import Signer
from tests.kit.patience import PATIENCE


class Idle:
    """A node that only exists."""

    async def run(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        task_status.started()
        await anyio.sleep_forever()


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGCHLD, and no daemon")
def test_the_end_of_the_daemon_is_seen_though_the_training_side_handles_its_own_childrens(tmp_path):
    """As torch's DataLoader does once it has workers: its handler takes the place of a loop's own."""
    transport = DaemonTransport(Identity.load_or_create(tmp_path / "key"), listen=("/ip4/127.0.0.1/tcp/0",))
    swarm = SwarmThread(transport, lambda update: Idle())

    async def until_restarted() -> None:
        with anyio.fail_after(30):
            await transport.until_restarted(1)

    swarm.start()
    before = signal.signal(signal.SIGCHLD, lambda number, frame: None)
    try:
        os.kill(transport.daemon_pid, signal.SIGKILL)
        swarm.call(until_restarted)
        assert transport.starts == 2
    finally:
        signal.signal(signal.SIGCHLD, before)
        swarm.stop(politely=False)


def test_who_tells_a_loop_that_has_ended_is_not_hurt_by_it():
    """A pause or a setting may come in the moment in which the swarm's side ends."""
    swarm = SwarmThread(MemoryNetwork().transport(Signer(bytes(32))), lambda update: Idle())
    heard = []

    async def hear() -> None:
        heard.append(True)

    swarm.tell(hear)  # before it is up
    swarm.start()
    swarm.tell(hear)
    swarm.call(hear)
    swarm._portal.start_task_soon(swarm._stop.set)
    swarm._thread.join()
    for _ in range(3):
        swarm.tell(hear)
    assert heard == [True, True]


class Joining(Idle):
    """A node that finds nobody, and looks on."""

    def __init__(self) -> None:
        self.looks = threading.Event()

    async def run(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        self.looks.set()
        await anyio.sleep_forever()


def test_a_start_that_is_interrupted_while_it_joins_leaves_nothing_behind_and_takes_no_time():
    node = Joining()
    swarm = SwarmThread(MemoryNetwork().transport(Signer(bytes(32))), lambda update: node)
    swarm._thread.start()
    assert node.looks.wait(PATIENCE)
    began = time.monotonic()
    swarm.stop(politely=True)
    assert not swarm.alive
    assert time.monotonic() - began < 10.0


def test_one_that_is_interrupted_before_it_has_a_node_never_goes_on_the_network():
    network, goes_on = MemoryNetwork(), threading.Event()

    def make(update: object) -> Joining:
        goes_on.wait(PATIENCE)
        return Joining()

    transport = network.transport(Signer(bytes(32)))
    swarm = SwarmThread(transport, make)
    swarm._thread.start()
    stopping = threading.Thread(target=lambda: swarm.stop(politely=True))
    stopping.start()
    assert swarm._given_up.wait(PATIENCE)
    goes_on.set()
    stopping.join(60)
    assert not swarm.alive
    assert not swarm.transport.services.fixed, "it was never entered"


class Refused(Idle):
    """A node that ends when it is told why."""

    def __init__(self) -> None:
        self.why: VersionError | None = None

    async def run(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        task_status.started()
        while self.why is None:
            await anyio.sleep(0.01)
        raise self.why


@pytest.mark.parametrize("ask", [SwarmThread.begin, SwarmThread.call], ids=lambda ask: ask.__name__)
def test_who_asks_a_loop_that_has_ended_learns_why(ask):
    """An upgrade to another wire version ended as an unexpected RuntimeError, if the training side asked just then."""
    node = Refused()
    swarm = SwarmThread(MemoryNetwork().transport(Signer(bytes(32))), lambda update: node)
    swarm.start()
    node.why = VersionError("wire version 1, this is 4")
    swarm._thread.join()
    with pytest.raises(LoopEnded):
        ask(swarm, anyio.sleep, 0)
    assert swarm.reason() is node.why


def test_why_is_waited_for_while_the_loop_is_about_to_end():
    node = Refused()
    swarm = SwarmThread(MemoryNetwork().transport(Signer(bytes(32))), lambda update: node)
    swarm.start()
    begun = swarm.begin(anyio.sleep_forever)
    node.why = VersionError("wire version 1, this is 4")
    with pytest.raises(CancelledError):
        begun.result()
    assert swarm.reason() is node.why


class Stubborn(Idle):
    """A node that cannot leave."""

    async def see_others_to_the_end(self) -> None:
        pass

    async def leave(self) -> None:
        raise RuntimeError("a stream raised what nobody expected")


def test_a_node_that_cannot_leave_ends_all_the_same_and_says_why(caplog):
    swarm = SwarmThread(MemoryNetwork().transport(Signer(bytes(32))), lambda update: Stubborn())
    swarm.start()
    swarm._portal.start_task_soon(swarm._leave, True)
    swarm._thread.join(20)
    assert not swarm.alive
    assert "leaving failed" in caplog.text
