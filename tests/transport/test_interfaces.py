"""A network card by its name."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from decentral.cli import main
from decentral.errors import UsageError
from decentral.transport.interfaces import card_of, cards, listen_addresses

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
