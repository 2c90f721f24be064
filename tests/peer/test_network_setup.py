"""How a peer goes on the network: asked first, then started in the role it has."""

from __future__ import annotations

import logging
import socket

import anyio
import pytest
import trio.testing

from decentral.errors import ConfigError, ListenError, PeerUnreachable
from decentral.peer import network_setup
from decentral.peer.network_setup import RelayWatch, check_relays, enter
from decentral.swarm.identity import Identity
from decentral.transport.memory import MemoryNetwork
from decentral.transport.reachability import Reachability
from decentral.wire.keys import Signer, peer_name

LISTEN = ("/ip4/127.0.0.1/tcp/0",)
NAME, OTHER = (peer_name(Signer(bytes([n]) * 32).peer) for n in range(2))
RELAY, PUBLIC = f"/ip4/45.67.0.1/tcp/4001/p2p/{NAME}", f"/ip4/45.67.0.2/tcp/4001/p2p/{OTHER}"


@pytest.fixture
def identity(tmp_path):
    return Identity.load_or_create(tmp_path / "identity.key")


@pytest.fixture
def found(monkeypatch):
    """Answer the question who can dial this machine by ``found.kind``."""

    class Found:
        kind, listen = "unknown", LISTEN

    async def probe(listen, others, clock):
        Found.asked = others
        return Reachability(Found.kind, Found.listen)

    monkeypatch.setattr(network_setup, "probe", probe)
    return Found


@pytest.mark.parametrize(
    ("kind", "role", "kept"),
    [
        ("public", "public", ()),
        ("nat", "private", (RELAY, PUBLIC)),
        ("symmetric nat", "private", (RELAY, PUBLIC)),
        ("firewall", "private", (RELAY, PUBLIC)),
        ("local", None, (RELAY,)),
        ("unknown", None, (RELAY,)),
    ],
)
def test_the_role_follows_from_what_others_say(identity, found, kind, role, kept):
    found.kind = kind
    made = enter("daemon", identity, LISTEN, relays=(RELAY,), invited_by=(PUBLIC,))
    assert (made.transport.options.reachability, made.transport.options.relays, made.relays) == (role, kept, kept)
    assert made.is_private == (role == "private")
    assert set(found.asked) == {RELAY, PUBLIC}


def test_a_native_peer_keeps_places_at_the_same_relays(identity, found):
    found.kind = "nat"
    assert enter("native", identity, LISTEN, relays=(RELAY,)).transport.options.relays == (RELAY,)


def test_the_relay_in_front_of_who_invited_is_asked_and_kept(identity, found):
    found.kind = "nat"
    made = enter("native", identity, LISTEN, invited_by=(f"{RELAY}/p2p-circuit/p2p/{OTHER}",))
    assert RELAY in found.asked
    assert made.relays == (RELAY,)


def test_the_port_that_was_tried_is_listened_on_unless_somebody_took_it(identity, found):
    found.listen = ("/ip4/127.0.0.1/tcp/40011",)
    assert enter("native", identity, LISTEN).transport.listen_on == found.listen
    with pytest.MonkeyPatch.context() as patch:

        def taken(listen):
            raise ListenError("taken")

        patch.setattr(network_setup, "check_listen", taken)
        assert enter("native", identity, LISTEN).transport.listen_on == LISTEN


def test_a_restart_listens_on_the_ports_of_before_unless_they_are_taken_or_others_are_named(identity):
    first = enter("native", identity, LISTEN)
    assert "/tcp/0" not in first.listen[0], "a port that a restart can come back to"
    assert enter("native", identity, LISTEN, before=first.listen).listen == first.listen
    assert enter("native", identity, LISTEN, before=["no address", "/ip4/10.0.0.1/tcp/1"]).listen != first.listen
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        named = (f"/ip4/127.0.0.1/tcp/{other.getsockname()[1]}",)
    assert enter("native", identity, named, before=first.listen).listen == named
    with socket.socket() as other:
        other.bind(("127.0.0.1", int(first.listen[0].rpartition("/")[2])))
        other.listen()
        assert enter("native", identity, LISTEN, before=first.listen).listen != first.listen


def test_a_transport_of_ones_own_is_taken_as_it_is(identity, found):
    own = MemoryNetwork().transport(Signer.generate())
    assert enter(own, identity, None).transport is own


@pytest.mark.parametrize(
    "address", ["", "relay", "/ip4/1.2.3.4/tcp/1", f"{RELAY}/p2p-circuit", f"/ip4/1.2.3.4/udp/1/p2p/{NAME}"]
)
def test_what_is_no_relay_is_refused_with_an_example(address):
    with pytest.raises(ConfigError, match="decentral relay prints it"):
        check_relays([address])


def test_a_notebook_whose_loop_runs_already_may_enter(identity):
    async def cell():
        return enter("native", identity, LISTEN).kind

    assert anyio.run(cell) == "unknown"


# ---- relays that do not answer ----


class Wires:
    """A transport that reaches one relay at first, and nobody through another, whose packets are swallowed."""

    def __init__(self):
        self.refuses = {RELAY}

    async def connect(self, peer, addresses):
        if PUBLIC in addresses:
            await anyio.sleep_forever()
        await anyio.sleep(0.1)
        if self.refuses & {*addresses}:
            raise PeerUnreachable("refused")

    def addresses(self):
        return (f"/ip4/192.168.1.5/tcp/4001/p2p/{NAME}",)


def test_relays_that_do_not_answer_are_named_within_20_s_with_whom_the_invite_reaches(caplog):
    async def look():
        wires, watch = Wires(), RelayWatch((RELAY, PUBLIC))
        async with anyio.create_task_group() as group:
            group.start_soon(watch.run, wires)
            await anyio.sleep(20)
            both = watch.silent
            wires.refuses.clear()
            await anyio.sleep(20)
            group.cancel_scope.cancel()
        return both, watch.silent

    caplog.set_level(logging.INFO, "decentral.peer")
    clock = trio.testing.MockClock(autojump_threshold=0)
    found = anyio.run(look, backend="trio", backend_options={"clock": clock})
    assert found == (("45.67.0.1:4001", "45.67.0.2:4001"), ("45.67.0.2:4001",))
    reaches = "the invite reaches: this network only (192.168.1.5)"
    assert caplog.messages == [
        f"relay 45.67.0.1:4001 does not answer, looking on; {reaches}",
        f"relay 45.67.0.2:4001 does not answer, looking on; {reaches}",
        "relay 45.67.0.1:4001 answers",
    ]
