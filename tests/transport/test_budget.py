"""What strangers may hold of this process."""

import anyio
import pytest

from decentral.errors import ConfigError, TransportError
from decentral.transport.budget import Budget, Limits

ONE, OTHER = b"1" * 32, b"2" * 32


def test_a_limit_below_one_is_refused_by_name():
    with pytest.raises(ConfigError, match="peer_nbytes=0"):
        Limits(peer_nbytes=0)


def test_streams_are_limited_per_peer_and_in_total_and_freed_by_their_end():
    budget = Budget(Limits(peer_streams=1, total_streams=2))
    with budget.inbound(ONE):
        with pytest.raises(TransportError, match="1 inbound streams"), budget.inbound(ONE):
            pytest.fail("one too many")
        with budget.inbound(OTHER), pytest.raises(TransportError, match="2 in all"), budget.inbound(b"3" * 32):
            pytest.fail("one too many")
        with budget.inbound(OTHER):
            pass
    assert budget.held(ONE) == (0, 0)


def test_one_peers_bytes_wait_while_anothers_pass():
    budget = Budget(Limits(peer_nbytes=10, total_nbytes=100))
    order = []

    async def take(name, peer, nbytes, until=None):
        async with budget.bytes_of(peer, nbytes):
            order.append(name)
            if until is not None:
                await until.wait()

    async def script():
        done = anyio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(take, "first", ONE, 8, done)
            await anyio.wait_all_tasks_blocked()
            group.start_soon(take, "second", ONE, 8)
            group.start_soon(take, "other", OTHER, 8)
            await anyio.wait_all_tasks_blocked()
            assert order == ["first", "other"]
            done.set()
        assert order == ["first", "other", "second"]

    anyio.run(script)


def test_a_cancelled_reservation_gives_its_bytes_back():
    budget = Budget(Limits(peer_nbytes=10))

    async def script():
        with anyio.CancelScope() as scope:
            async with budget.bytes_of(ONE, 10):
                scope.cancel()
                await anyio.sleep_forever()
        assert budget.held(ONE) == (0, 0)

    anyio.run(script)
