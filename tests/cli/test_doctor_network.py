"""The doctor's lines on this machine's network, with routes that are given and a relay that is a socket."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from decentral.cli.checks import network, source_of


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
