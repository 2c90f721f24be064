"""What can be listened on, and what others may dial."""

from __future__ import annotations

import socket

import anyio
import pytest
from click.testing import CliRunner

from decentral.cli import main
from decentral.errors import ConfigError, ListenError, UsageError
from decentral.transport.base import MAX_ADDRESSES, check_listen, dialable, everywhere, pin_ports
from decentral.transport.interfaces import card_of, cards, listen_addresses
from decentral.transport.native.tcp import bound_addresses, listeners


@pytest.mark.parametrize(
    "address",
    ["", "localhost:80", "/ip4/::1/tcp/0", "/ip6/127.0.0.1/tcp/0", "/ip4/1.2.3.4/tcp/99999", "/ip4/1.2.3/tcp/1"],
)
def test_a_malformed_listen_address_is_named_with_what_is_wanted(address):
    with pytest.raises(ConfigError, match="want /ip4/HOST/tcp/PORT"):
        check_listen([address])


def test_no_listen_address_at_all_is_refused():
    with pytest.raises(ConfigError, match="at least one"):
        check_listen([])


def test_a_busy_port_is_named_even_when_it_would_be_shared():
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        address = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"
        with pytest.raises(ListenError, match=f"cannot listen on {address}: Address already in use") as caught:
            check_listen(["/ip4/127.0.0.1/tcp/0", address])
    assert "\n" not in str(caught.value)
    check_listen([address])


def test_an_address_of_another_machine_cannot_be_listened_on():
    with pytest.raises(ListenError, match=r"/ip4/192\.0\.2\.77/tcp/0"):
        check_listen(["/ip4/192.0.2.77/tcp/0"])


def test_everywhere_is_all_interfaces_of_both_families():
    assert everywhere(4001) == ("/ip4/0.0.0.0/tcp/4001", "/ip6/::/tcp/4001")
    check_listen(everywhere())


def test_ports_the_system_chose_are_kept_for_the_restart():
    bound = ["/ip4/127.0.0.1/tcp/4101", "/ip4/10.1.2.3/tcp/4101", "/ip6/::1/tcp/4202"]
    assert pin_ports(everywhere(), bound) == ("/ip4/0.0.0.0/tcp/4101", "/ip6/::/tcp/4202")
    assert pin_ports(("/ip4/127.0.0.1/tcp/0", "/ip4/10.1.2.3/tcp/77"), bound) == (
        "/ip4/127.0.0.1/tcp/4101",
        "/ip4/10.1.2.3/tcp/77",
    )


def test_dialable_addresses_are_public_first_and_leave_out_what_nobody_can_reach():
    found = [
        "/ip4/127.0.0.1/tcp/1",
        "/ip4/198.51.100.9/tcp/1/p2p/X/p2p-circuit",
        "/ip4/192.168.0.7/tcp/1",
        "/ip4/0.0.0.0/tcp/1",
        "/ip6/fe80::1/tcp/1",
        "/ip4/8.8.8.8/tcp/1",
        "/ip4/8.8.8.8/tcp/1",
    ]
    assert dialable(found, "ME") == (
        "/ip4/8.8.8.8/tcp/1/p2p/ME",
        "/ip4/192.168.0.7/tcp/1/p2p/ME",
        "/ip4/198.51.100.9/tcp/1/p2p/X/p2p-circuit/p2p/ME",
    )


def test_loopback_is_dialable_only_when_there_is_nothing_else():
    assert dialable(["/ip4/127.0.0.1/tcp/1", "/ip6/::1/tcp/1"], "ME") == (
        "/ip4/127.0.0.1/tcp/1/p2p/ME",
        "/ip6/::1/tcp/1/p2p/ME",
    )


def test_no_more_addresses_are_given_than_a_lease_holds():
    assert len(dialable([f"/ip4/8.8.8.8/tcp/{port}" for port in range(1, 99)], "ME")) == MAX_ADDRESSES


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_an_address_is_listened_on_whatever_the_resolver_says_of_its_family(host, monkeypatch):
    """With IPv6 only it says that 127.0.0.1 is none, and whoever asked a relay from there did not start. Any error of
    0.0.0.0 was taken for that: once, in some twenty runs of all tests, a host with IPv4 listened nowhere.
    """

    async def denies(*args, **kwargs):
        raise OSError(-9, "Address family for hostname not supported")

    monkeypatch.setattr("anyio._core._sockets.getaddrinfo", denies)

    async def script():
        (socket,) = await listeners([f"/ip4/{host}/tcp/0"])
        async with socket:
            address = bound_addresses([socket])[0]
            await (await anyio.connect_tcp("127.0.0.1", int(address.split("/")[-1]))).aclose()

    anyio.run(script, backend="trio")


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_that_is_taken_meanwhile_is_named_with_the_reason(host):
    async def script():
        async with (await listeners([f"/ip4/{host}/tcp/0"]))[0] as first:
            port = first.extra(anyio.abc.SocketAttribute.local_port)
            with pytest.raises(ListenError, match=rf"/ip4/{host}/tcp/{port}: .*in use"):
                await listeners([f"/ip4/{host}/tcp/{port}"])

    anyio.run(script, backend="trio")


# ---- a network card by its name ----


KNOWN = {"lo": ["127.0.0.1"], "eth1": ["10.0.0.7", "fd00::7"], "wg0:1": ["10.1.0.7"], "down": []}


@pytest.mark.parametrize(
    ("given", "addresses"),
    [
        ("eth1", ("/ip4/10.0.0.7/tcp/0", "/ip6/fd00::7/tcp/0")),
        ("eth1:4001", ("/ip4/10.0.0.7/tcp/4001", "/ip6/fd00::7/tcp/4001")),
        ("wg0:1", ("/ip4/10.1.0.7/tcp/0",)),  # an alias has a colon of its own
        ("/ip4/10.0.0.7/tcp/9", ("/ip4/10.0.0.7/tcp/9",)),
    ],
)
def test_a_card_means_all_of_its_addresses(given: str, addresses: tuple[str, ...]) -> None:
    assert listen_addresses(given, KNOWN) == addresses


@pytest.mark.parametrize(
    ("given", "words"), [("eth9", "there are lo, eth1"), ("down", "no network card"), ("eth1:x", "'x' is no port")]
)
def test_what_is_no_card_is_told_with_those_that_there_are(given: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        listen_addresses(given, KNOWN)


def test_an_address_tells_its_card() -> None:
    assert card_of("fd00::7", KNOWN) == "eth1"
    assert card_of("10.0.0.8", KNOWN) == ""


def test_the_loopback_of_this_machine_is_a_card() -> None:
    assert "127.0.0.1" in cards()["lo"] if "lo" in cards() else any("127.0.0.1" in hosts for hosts in cards().values())


def test_a_start_on_a_card_that_is_not_there_is_one_line_and_makes_nothing(tmp_path) -> None:
    out = tmp_path / "out"
    result = CliRunner().invoke(main, ["join", "decentral1:x", "--listen", "nocard7", "--out", str(out)])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "nocard7" in result.stderr
    assert not out.exists()
