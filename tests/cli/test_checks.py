"""What the doctor says of this machine's network and of the way to others, and what it tells to do."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from decentral.cli.checks import network, reachable, room_for, source_of, verdict
from decentral.swarm.invite import Invite
from decentral.transport.reachability import Reachability, View
from decentral.wire.keys import Signer, peer_name

LISTEN = ("/ip4/0.0.0.0/tcp/4001",)
VIEW = View(Signer(bytes(32)).peer, "/ip4/45.67.0.9/tcp/9", 9, answered=False, skew=0.0)


@pytest.mark.parametrize(
    ("kind", "relays_known", "grade", "words"),
    [
        ("public", False, "ok", ["public", "dialled back at /ip4/45.67.0.9/tcp/9"]),
        ("local", False, "ok", ["local", "nobody outside"]),
        (
            "nat",
            True,
            "ok",
            [
                "port-preserving NAT",
                "through relays",
                "such as 4001, and give --listen /ip4/0.0.0.0/tcp/4001",
            ],
        ),
        ("nat", False, "warn", ["port-preserving NAT", "--relay", "decentral relay"]),
        ("symmetric nat", True, "ok", ["symmetric NAT", "through relays"]),
        ("symmetric nat", False, "warn", ["symmetric NAT", "--relay"]),
        ("firewall", True, "ok", ["firewall", "open a TCP port, such as 4001, and give --listen"]),
        ("unknown", False, "warn", ["nobody could say", "--relay"]),
    ],
)
def test_every_verdict_says_what_was_found_and_what_to_do(kind, relays_known, grade, words):
    found = verdict(Reachability(kind, LISTEN, (VIEW,)), relays_known=relays_known)
    assert found.verdict == grade
    assert [word for word in words if word not in found.detail] == []
    assert "\n" not in found.detail


def test_an_invite_that_nobody_answers_is_not_asked_for_again():
    nowhere = f"/ip4/127.0.0.1/tcp/1/p2p/{peer_name(VIEW.peer)}"  # nothing listens there
    for relays, invite, whom in (
        ((), str(Invite(bytes(32), (nowhere,))), "the invite's addresses"),
        ((nowhere,), None, "the addresses at --relay"),
    ):
        (finding,) = reachable(("/ip4/127.0.0.1/tcp/0",), relays, invite)
        assert finding.verdict == "warn"
        assert f"nobody at {whom} answered; is somebody up there" in finding.detail
        assert "fresh invite" in finding.detail
        assert "give an invite" not in finding.detail


def test_without_anybody_to_ask_it_says_so_and_takes_no_time():
    (finding,) = reachable(("/ip4/127.0.0.1/tcp/0",), (), None)
    assert finding.verdict == "warn"
    assert "give an invite, or --relay ADDR" in finding.detail


# ---- this machine's network, with routes that are given and a relay that is a socket ----


def routes(**known: str) -> Callable[[socket.AddressFamily, str], str]:
    def source(family: socket.AddressFamily, host: str) -> str:
        name = "ipv4" if family is socket.AF_INET else "ipv6"
        if name not in known:
            raise OSError("Network is unreachable")
        return known[name]

    return source


@pytest.mark.parametrize(
    ("known", "verdicts", "words"),
    [
        ({"ipv4": "10.0.0.2", "ipv6": "2a00::2"}, ("ok", "ok"), "leaves from 2a00::2"),
        ({"ipv4": "10.0.0.2"}, ("ok", "ok"), "peers of this kind alone need a relay"),
        ({}, ("warn", "warn"), "meets peers of its own network only; check its router"),
    ],
)
def test_each_kind_of_ip_is_looked_at_and_one_is_enough(
    known: dict[str, str], verdicts: tuple[str, str], words: str
) -> None:
    found = {finding.what: finding for finding in network((), routes(**known))}
    assert (found["ipv4"].verdict, found["ipv6"].verdict) == verdicts
    assert words in found["ipv6"].detail
    assert {"udp", "mapping", "hairpin"} < set(found), "what is not used is said, too"


def test_a_relay_that_answers_has_a_time_and_one_that_does_not_has_a_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        at = f"/ip4/127.0.0.1/tcp/{server.getsockname()[1]}"
        *_, answers = network([f"{at}/p2p/12D3KooWabc"], routes())
    *_, silent = network([f"{at}/p2p/12D3KooWabc"], routes())
    assert answers.verdict == "ok"
    assert answers.detail.startswith(f"{at} answers in ")
    assert silent.verdict == "warn"
    assert "Name another one beside it" in silent.detail


def test_asking_for_a_route_sends_nothing_and_names_this_machine() -> None:
    assert source_of(socket.AF_INET, "127.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize(
    ("free", "verdict", "way_out"),
    [
        (16e9, "ok", "all of the run's 134.0 M parameters take 4.5 GB beside a batch, and 16.0 GB are free"),
        (3.6e9, "warn", "join with --memory 3.2GB, which has what rounds need in files"),
        (2.2e9, "warn", "join with --memory 1.9GB, which trains 3 of 8 fragments"),
        (0.5e9, "fail", "one of its 8 fragments 1.3 GB, and 0.5 GB are free"),
    ],
)
def test_what_a_run_takes_of_the_memory_is_said_with_the_way_to_take_part(
    free: float, verdict: str, way_out: str
) -> None:
    found = room_for([16_750_000] * 8, int(free))
    assert found.verdict == verdict
    assert way_out in found.detail
