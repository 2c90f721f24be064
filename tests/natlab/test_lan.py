"""Peers of one household meet although nobody else answers, and a machine without multicast runs on."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from decentral.errors import NoPeersError
from decentral.flow.waiting import inline
from decentral.manifest import Manifest, preset_manifest
from decentral.node.node import Node, Start
from decentral.parameters import schema_of
from decentral.peer.joining import fetch
from decentral.rounds.local_state import Ledger
from decentral.swarm.directory import Directory
from decentral.swarm.invite import Invite
from decentral.swarm.lan import Lan
from decentral.swarm.meeting import find_invite, host_words
from decentral.swarm.words import SpokenCode
from decentral.transport.native.transport import NativeTransport
from decentral.wire.keys import Signer, peer_name
from tests.natlab.lab import Lab
from tests.natlab.nat import PORT_PRESERVING

RUN = b"r" * 32
SIGNERS = [Signer(bytes([n]) * 32) for n in range(4)]
GONE = peer_name(Signer(bytes([9]) * 32).peer)
PATIENCE = 30.0  # s; it takes 0.2 to 2
Events = list[tuple[str, dict[str, Any]]]
Away = Callable[..., "Future[Any]"]


async def _meet(
    signer: Signer,
    others: int,
    together: threading.Barrier,
    run: bytes = RUN,
    bootstrap: tuple[str, ...] = (),
    found_at: Future[tuple[str, ...]] | None = None,
) -> tuple[Events, int]:
    """Be a peer until each has met so many others; what happened to this one, and how many others it knows.

    On any free port: a kernel was seen to call a fixed one taken, now and then, in a namespace made a moment ago.
    """
    events: Events = []
    transport = NativeTransport(signer, listen=("/ip4/0.0.0.0/tcp/0",))
    directory = Directory(transport, signer, run, ttl=15.0, dht=False)
    lan = Lan(lambda event, fields: events.append((event, fields)))
    with anyio.fail_after(PATIENCE):
        async with transport, anyio.create_task_group() as group:
            await group.start(directory.run)
            if found_at is not None:
                found_at.set_result(transport.addresses())
            directory.add_bootstrap(bootstrap)
            group.start_soon(lan.run, directory)
            while len(directory.live()) < others or not events:
                await anyio.sleep(0.02)
            await anyio.to_thread.run_sync(together.wait, PATIENCE)
            group.cancel_scope.cancel()
    return events, len(directory.live())


def test_peers_of_a_run_meet_at_home_although_their_bootstrap_does_not_answer(lab: Lab, away: Away) -> None:
    home, together = lab.household("home", PORT_PRESERVING), threading.Barrier(3)
    stale = (f"/ip4/45.67.99.9/tcp/4001/p2p/{GONE}",)
    hosts = [home.host(name) for name in ("alice", "bob", "carol")]
    lives = [away(host, anyio.run, _meet, SIGNERS[n], 2, together, RUN, stale) for n, host in enumerate(hosts)]
    for host, life in zip(hosts, lives, strict=True):
        events, known = life.result(PATIENCE)
        assert events[0] == ("lan", {"on": [host.v4]})
        assert known == 2


def test_peers_of_other_runs_are_left_alone(lab: Lab, away: Away) -> None:
    home, together = lab.household("home", PORT_PRESERVING), threading.Barrier(4)
    runs = [RUN, bytes(32), RUN, bytes(32)]
    lives = [away(home.host(f"host{n}"), anyio.run, _meet, SIGNERS[n], 1, together, one) for n, one in enumerate(runs)]
    assert [life.result(PATIENCE)[1] for life in lives] == [1, 1, 1, 1]


def _manifest() -> Manifest:
    return preset_manifest("diloco", run={"rounds": 10, "salt": "lan", "seed": 0})


async def _found(manifest: Manifest, over: threading.Event) -> None:
    """A run's first peer, until the test is over."""
    schema = schema_of(torch.nn.Linear(4, 4), manifest.outer.fragments)
    start = Start(
        manifest=manifest, schema=schema, anchors=[torch.zeros(f.numel) for f in schema.fragments], founder=True
    )
    transport = NativeTransport(SIGNERS[0])
    node = Node(
        start,
        signer=SIGNERS[0],
        transport=transport,
        ledger=Ledger(lambda commit, frames: None, lambda blob: None),
        on_update=lambda update: None,
        on_event=lambda event, fields: None,
        offload=inline,
    )
    async with transport, anyio.create_task_group() as group:
        await group.start(node.run)
        group.start_soon(Lan(lambda event, fields: None).run, node.directory)
        await anyio.to_thread.run_sync(over.wait)
        group.cancel_scope.cancel()


def test_an_invite_whose_addresses_are_stale_is_enough_at_home(lab: Lab, away: Away, tmp_path: Path) -> None:
    home, manifest, over = lab.household("home", PORT_PRESERVING), _manifest(), threading.Event()
    invite = Invite(manifest.digest, (f"/ip4/45.67.99.9/tcp/4001/p2p/{GONE}",))
    first = away(home.host("alice"), anyio.run, _found, manifest, over)
    try:
        newcomer = away(home.host("bob"), fetch, invite, tmp_path, None, PATIENCE, "native")
        assert newcomer.result(2 * PATIENCE).digest == manifest.digest
    finally:
        over.set()
    first.result(PATIENCE)


def test_where_another_program_keeps_the_port_the_peer_runs_on_with_one_event(lab: Lab, away: Away) -> None:
    """And meets others by the invite as ever."""
    home, together = lab.household("home", PORT_PRESERVING), threading.Barrier(2)
    alice, bob = home.host("alice"), home.host("bob")
    with alice.socket(kind=socket.SOCK_DGRAM) as taken:
        taken.bind(("", 5353))
        found_at: Future[tuple[str, ...]] = Future()
        other = away(bob, anyio.run, _meet, SIGNERS[1], 1, together, RUN, (), found_at)
        invited = found_at.result(PATIENCE)
        ((name, fields),), known = away(alice, anyio.run, _meet, SIGNERS[0], 1, together, RUN, invited).result(PATIENCE)
        other.result(PATIENCE)
    assert (name, known) == ("lan", 1)
    assert "UDP port 5353 cannot be shared (Address already in use)" in str(fields["off"])


# ---- words on a home network: host and guest meet without a relay and without the internet ----


CODE = SpokenCode(("acid", "cargo", "mural", "tulip"), 4711)
INVITE = str(Invite(bytes(32), (), "a-secret-token"))


@pytest.mark.long
def test_words_are_exchanged_at_home_and_nobody_next_door_hears_of_it(lab: Lab, away: Any) -> None:
    home, next_door = lab.household("home", PORT_PRESERVING), lab.household("next door", PORT_PRESERVING)
    alice, bob, eve = home.host("alice"), home.host("bob"), next_door.host("eve")
    told: Future[list[str]] = Future()
    hosts = away(alice, anyio.run, partial(host_words, CODE, INVITE, (), seconds=PATIENCE, ready=told.set_result))
    assert told.result(PATIENCE) == ["this network"]
    elsewhere = away(eve, anyio.run, partial(find_invite, CODE, (), seconds=3.0))
    with pytest.raises(NoPeersError):
        elsewhere.result(PATIENCE)
    assert str(away(bob, anyio.run, partial(find_invite, CODE, (), seconds=PATIENCE)).result(PATIENCE)) == INVITE
    assert len(hosts.result(PATIENCE)) == 32
