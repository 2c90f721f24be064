"""An invite line: whole and unaltered, or one line that says what happened to it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decentral.errors import InviteError
from decentral.swarm.invite import PREFIX, Invite, reach

ADDRESS = "/ip4/192.0.2.1/tcp/4001/p2p/12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq"
INVITE = Invite(bytes(range(32)), (ADDRESS, "/dns4/example.org/udp/4001/quic-v1"), "let-me-in")

VISIBLE = st.characters(min_codepoint=33, max_codepoint=126)
ADDRESSES = st.lists(st.text(VISIBLE, max_size=255).map(lambda text: "/" + text), max_size=8).map(tuple)
TOKENS = st.none() | st.text(VISIBLE, max_size=128)


@given(st.binary(min_size=32, max_size=32), ADDRESSES, TOKENS)
@settings(max_examples=200, deadline=None)
def test_an_invite_is_read_back_as_it_was(run: bytes, addresses: tuple[str, ...], token: str | None) -> None:
    invite = Invite(run, addresses, token)
    assert Invite.parse(str(invite)) == invite


def test_it_is_found_in_the_line_that_a_peer_prints_and_in_what_a_mail_program_makes_of_it() -> None:
    line = str(INVITE)
    for text in (
        f"decentral join {line}\n",
        f"decentral join {line} --data 'PATH/TO/my novel'",
        f"\n{line[:40]}\r\n  {line[40:]} \n",
    ):
        assert Invite.parse(text) == INVITE


def test_an_invite_is_one_short_word_without_a_token_unless_given() -> None:
    line = str(Invite(bytes(32), (ADDRESS,)))
    assert line.isascii()
    assert len(line.split()) == 1
    assert len(line) < 190
    assert Invite.parse(line).token is None


def test_every_cut_is_called_cut_or_no_invite() -> None:
    line = str(INVITE)
    for length in range(len(line)):
        complaint = "cut short" if length > len(PREFIX) - 1 else "an invite begins with decentral1:"
        with pytest.raises(InviteError, match=complaint):
            Invite.parse(line[:length])


def test_other_text_is_named_in_one_line() -> None:
    """As far as it is not among the hostile ones of tests/corpus."""
    for text, complaint in {
        "hello": "hello is not an invite",
        "https://example.org/join?run=1": "https://example.org/ is not an invite",
        "decentral1:A": "cut short",
        f"{INVITE}é": "characters that do not belong",
        f"{INVITE}{INVITE}": "characters that do not belong",
        "\x1b[31mdecentral1:": "is not an invite",
    }.items():
        with pytest.raises(InviteError, match=complaint) as caught:
            Invite.parse(text)
        assert str(caught.value).isprintable()


def test_every_altered_letter_is_noticed() -> None:
    line = str(INVITE)
    for position in range(len(PREFIX), len(line)):
        for other in "Az_":
            if line[position] != other:
                with pytest.raises(InviteError, match=r"altered|cut short|something follows"):
                    Invite.parse(line[:position] + other + line[position + 1 :])


@pytest.mark.parametrize(
    ("run", "addresses", "token"),
    [
        (bytes(31), (), None),
        (bytes(32), (ADDRESS,) * 9, None),
        (bytes(32), ("/" + "a" * 256,), None),
        (bytes(32), ("192.0.2.1:4001",), None),
        (bytes(32), ("",), None),
        (bytes(32), ("/ip4/\n",), None),
        (bytes(32), (), "t" * 129),
        (bytes(32), (), "two words"),
    ],
)
def test_an_invite_that_breaks_a_bound_cannot_be_made(run: bytes, addresses: tuple[str, ...], token: str) -> None:
    with pytest.raises(InviteError, match="invite: ") as caught:
        Invite(run, addresses, token)
    assert str(caught.value).isprintable()


LAN, PUBLIC, LOOP, RELAYED, RELAYED_NEARBY = (
    "/ip4/192.168.1.5/tcp/4001/p2p/N",
    "/ip4/45.67.0.1/tcp/4001/p2p/N",
    "/ip4/127.0.0.1/tcp/4001/p2p/N",
    "/ip4/45.67.0.2/tcp/4001/p2p/R/p2p-circuit/p2p/N",
    "/ip4/192.168.1.9/tcp/4002/p2p/R/p2p-circuit/p2p/N",
)


@pytest.mark.parametrize(
    ("addresses", "whom"),
    [
        ((), "nobody yet"),
        ((LOOP, "/ip6/::1/tcp/4001/p2p/N"), "this machine only (127.0.0.1)"),
        ((LOOP, LAN), "this network only (192.168.1.5)"),
        (("/ip4/100.64.1.2/tcp/4001/p2p/N",), "this network only (100.64.1.2)"),  # of a provider's own NAT
        (("/ip6/fd00::2/tcp/4001/p2p/N",), "this network only (fd00::2)"),
        ((LAN, RELAYED_NEARBY), "this network only, through the relay 192.168.1.9:4002"),
        ((LAN, PUBLIC), "anybody, at 45.67.0.1 (if its port is open)"),
        (("/dns4/example.org/tcp/4001/p2p/N",), "anybody, at example.org (if its port is open)"),
        ((LAN, PUBLIC, RELAYED), "anybody, through the relay 45.67.0.2:4001"),
    ],
)
def test_each_says_whom_it_reaches(addresses: tuple[str, ...], whom: str) -> None:
    assert reach(addresses) == whom
