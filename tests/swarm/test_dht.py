"""The DHT beside the directory, and the directory on real daemons."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from decentral.swarm.contacts import LeaseMessages
from decentral.swarm.dht import _no_word_of_hivemind, dht_key, lease_validator
from decentral.swarm.directory import Directory
from decentral.swarm.identity import Identity
from decentral.transport.daemon.transport import DaemonTransport, quiet_hivemind
from decentral.wire.keys import Signer, peer_name
from decentral.wire.messages import Lease, encode, seal_lease

RUN = b"r" * 32
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
TTL = 6.0


def make(folder: Path, name: str, ttl: float = TTL, dht: bool = True) -> Directory:
    identity = Identity.load_or_create(folder / f"{name}.key")
    return Directory(DaemonTransport(identity, listen=LOOPBACK), identity.signer, RUN, ttl, dht=dht)


async def until(holds, seconds: float = 60.0) -> float:
    """Look at short intervals; returns the seconds it took."""
    began = anyio.current_time()
    with anyio.fail_after(seconds):
        while not holds():
            await anyio.sleep(0.02)
    return anyio.current_time() - began


def test_a_peer_that_knows_only_the_first_finds_the_second_through_the_dht(tmp_path, monkeypatch):
    monkeypatch.setattr(LeaseMessages, "_heard_of", lambda *of: None)  # only the DHT tells of third peers
    quiet_hivemind()
    first, second, third = (make(tmp_path, name) for name in ("first", "second", "third"))

    async def script():
        async with first.transport, second.transport, third.transport, anyio.create_task_group() as group:
            for directory in (first, second, third):
                await group.start(directory.run)
            for directory in (second, third):
                directory.add_bootstrap(first.transport.addresses())
            took = await until(lambda: second.peer in third.live() and third.peer in second.live())
            print(f"found through the DHT after {took:.1f} s")
            lease = third.live()[second.peer]
            assert lease.addresses == second.transport.addresses()
            starts = first.transport.starts
            subprocess.run(["kill", "-9", str(first.transport.daemon_pid)], check=True)
            await first.transport.until_restarted(starts)
            await until(lambda: {second.peer, third.peer} == set(first.live()))
            group.cancel_scope.cancel()

    anyio.run(script)


PEER = """
import sys, anyio
from pathlib import Path
from decentral.swarm.directory import Directory
from decentral.swarm.identity import Identity
from decentral.transport.daemon.transport import DaemonTransport

async def main():
    identity = Identity.load_or_create(Path(sys.argv[1]))
    transport = DaemonTransport(identity, listen=["/ip4/127.0.0.1/tcp/0"])
    directory = Directory(transport, identity.signer, b"r" * 32, float(sys.argv[2]), dht=False)
    async with transport, anyio.create_task_group() as group:
        await group.start(directory.run)
        directory.add_bootstrap(sys.argv[3:])
        await anyio.sleep_forever()

anyio.run(main)
"""


def test_the_lease_of_a_peer_that_was_sigkilled_ends_after_its_life(tmp_path):
    ttl = 2.0
    here = make(tmp_path, "here", ttl, dht=False)

    async def script():
        async with here.transport, anyio.create_task_group() as group:
            await group.start(here.run)
            command = [sys.executable, "-c", PEER, str(tmp_path / "there.key"), str(ttl)]
            with subprocess.Popen([*command, *here.transport.addresses()]) as there:
                await until(lambda: not here.looking)
                (peer,) = here.live()
                there.kill()
                there.wait()
            took = await until(lambda: here.looking)
            assert ttl / 3 < took < 2 * ttl
            assert here.heard(peer) < 2 * ttl
            group.cancel_scope.cancel()

    anyio.run(script)


# ---- what is stored for others ----


@pytest.fixture(scope="module")
def hivemind():
    quiet_hivemind()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whoever imports it first meets its use of torch.jit.script
        import hivemind

    return hivemind


def signed(seed: int, run: bytes = RUN) -> Lease:
    signer = Signer(bytes([seed]) * 32)
    told = {"addresses": (), "epoch": 0, "round": 0, "digest": bytes(32), "state": 0, "uplink": 0, "version": "1"}
    return seal_lease(Lease(run=run, peer=signer.peer, sequence=1, ttl=60, **told), signer)


def record(lease: Lease, *, key: str | None = None, name: str | None = None, value: object = None, life: float = 60.0):
    from hivemind.dht.routing import DHTID
    from hivemind.dht.validation import DHTRecord
    from hivemind.utils import MSGPackSerializer

    return DHTRecord(
        DHTID.generate(source=key or dht_key(RUN)).to_bytes(),
        MSGPackSerializer.dumps(name or peer_name(lease.peer)),
        MSGPackSerializer.dumps(encode(lease) if value is None else value),
        time.time() + life,
    )


def test_the_dht_keeps_only_signed_leases_of_its_run_each_under_its_signers_name(hivemind):
    validator, lease = lease_validator(RUN), signed(1)
    assert validator.validate(record(lease))
    refused = {
        "another key": record(lease, key="elsewhere"),
        "another peer's name": record(lease, name=peer_name(signed(2).peer)),
        "another run": record(signed(1, run=b"x" * 32)),
        "altered": record(lease, value=encode(lease)[:-1] + b"\0"),
        "no lease": record(lease, value=b"rubbish"),
        "no bytes": record(lease, value=[encode(lease)]),
        "too large": record(lease, value=bytes(1 << 20)),
        "for ever": record(lease, life=1e9),
    }
    assert {why: validator.validate(each) for why, each in refused.items()} == dict.fromkeys(refused, False)


def test_the_dht_keeps_records_of_so_many_peers_and_no_more(hivemind, monkeypatch):
    monkeypatch.setattr("decentral.swarm.dht._STORED", 3)
    kept = lease_validator(RUN)
    assert [kept.validate(record(signed(seed))) for seed in range(1, 6)] == [True, True, True, False, False]
    assert kept.validate(record(signed(1))), "who is kept may renew"


def test_a_look_up_of_hivemind_that_fails_is_no_traceback_on_the_screen_and_any_other_task_is(caplog):
    """Who joined saw "Task exception was never retrieved" and ten lines of hivemind when a peer went meanwhile."""
    theirs: dict[str, Any] = {}
    exec(compile("async def look():\n    raise AssertionError", "/lib/hivemind/dht/traverse.py", "exec"), theirs)

    async def ours() -> None:
        raise ValueError("of our own")

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(partial(_no_word_of_hivemind, None))
        for look in (theirs["look"], ours):
            await asyncio.wait([asyncio.create_task(look())])
            gc.collect()

    asyncio.run(main())
    (shown,) = [record for record in caplog.records if record.name == "asyncio"]
    assert "of our own" in shown.getMessage()


def test_a_hint_of_another_run_or_of_oneself_is_not_followed(tmp_path):
    directory = make(tmp_path, "me")
    directory._contacts.spawn = pytest.fail  # type: ignore[method-assign]
    directory.hint(signed(1, run=b"x" * 32))
    directory.hint(directory.own.seal())
