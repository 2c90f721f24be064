"""A swarm in which a peer hears of most others by way of one that passes them on; in virtual time."""

from __future__ import annotations

import anyio

from decentral.simulate.backend import run_in_virtual_time
from decentral.swarm.directory import Directory
from decentral.transport.memory import MemoryNetwork
from decentral.wire.keys import Signer

TTL, COUNT = 12.0, 30


class Swarm:
    """Directories that all know the first."""

    def __init__(self, group):
        self.network, self.group = MemoryNetwork(latency=0.05, letters=True), group
        self.scopes = {}
        signers = [Signer(bytes([number + 1]) * 32) for number in range(COUNT)]
        self.directories = [Directory(self.network.transport(one), one, b"r" * 32, TTL) for one in signers]

    async def live(self, directory):
        with anyio.CancelScope() as self.scopes[directory.peer]:
            async with directory.transport, anyio.create_task_group() as group:
                directory.add_bootstrap(self.directories[0].transport.addresses())
                await group.start(directory.run)
                await anyio.sleep_forever()

    def seen(self):
        return {len(one.live()) for one in self.directories if one.peer in self.scopes}


def play(script):
    async def main():
        async with anyio.create_task_group() as group:
            swarm = Swarm(group)
            for directory in swarm.directories:
                group.start_soon(swarm.live, directory)
            await anyio.sleep(4 * TTL)
            await script(swarm)
            group.cancel_scope.cancel()

    run_in_virtual_time(main, 0)


def test_everybody_stays_known_though_few_are_told():
    async def script(swarm):
        before = [one.transport.traffic.kinds for one in swarm.directories]
        assert swarm.seen() == {COUNT - 1}
        for _ in range(40):
            await anyio.sleep(TTL / 8)
            assert swarm.seen() == {COUNT - 1}, before

    play(script)


def test_who_dies_is_forgotten_by_all_soon_after_its_lease():
    async def script(swarm):
        dead = swarm.directories[7]
        swarm.network.kill(dead.peer)
        swarm.scopes.pop(dead.peer).cancel()
        await anyio.sleep(TTL + 1.0)
        assert swarm.seen() == {COUNT - 2}

    play(script)


def test_news_reaches_everybody_within_two_renewals():
    async def script(swarm):
        swarm.directories[3].own.update(round=5)
        await anyio.sleep(2 * TTL / 3 + 1.0)
        told = {
            one.live()[swarm.directories[3].peer].round
            for one in swarm.directories
            if one.peer != swarm.directories[3].peer
        }
        assert told == {5}

    play(script)
