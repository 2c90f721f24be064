"""A run that admits by token: who has none is told nothing, given nothing and not believed."""

import hashlib

import anyio
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from decentral.errors import InviteError, PeerUnreachable, TransportError, UsageError
from decentral.swarm.invite import MIN_TOKEN, PREFIX, Admission, AdmittingTransport, Invite, check_token
from decentral.transport.memory import MemoryNetwork
from decentral.transport.requests import request, serve_requests
from decentral.transport.throttle import Caps, ThrottledTransport
from decentral.wire.keys import PeerId, Signer

RUN, TOKEN = bytes(range(32)), "correct-horse-battery"
CLOSED, OPEN = "/test/closed/1", "/test/open/1"


def signer(number: int) -> Signer:
    return Signer(hashlib.blake2b(bytes([number]), digest_size=32).digest())


A, B, C = (signer(number).peer for number in range(3))


def admission(me: PeerId, token: str = TOKEN, run: bytes = RUN) -> Admission:
    return Admission(token, run, me)


def test_a_proof_holds_for_one_pair_of_peers_in_one_direction_of_one_run() -> None:
    here = admission(A)
    assert here.take(B, admission(B).proof(A))
    assert here.admits(B)
    for peer, proof in [
        (C, admission(B).proof(A)),  # passed on
        (C, admission(C).proof(B)),  # meant for another
        (B, here.proof(B)),  # our own, sent back
        (C, admission(C, token="another-horse-battery").proof(A)),
        (C, admission(C, run=bytes(32)).proof(A)),
        (C, b""),
    ]:
        assert not admission(A).take(peer, proof)
    assert not here.admits(C)


def test_the_token_is_not_in_its_proof() -> None:
    assert TOKEN.encode() not in admission(A).proof(B)


@pytest.mark.parametrize(
    "token", ["", "short", "x" * (MIN_TOKEN - 1), "x" * 129, "with a space in it", "ümläute-ümläute"]
)
def test_a_token_that_is_easily_guessed_or_fits_no_invite_is_refused(token: str) -> None:
    with pytest.raises(UsageError, match="want 12 to 128 visible ASCII ones"):
        check_token(token)


class Pair:
    """A member, and another peer that has a token, another one or none."""

    def __init__(self, token: str | None) -> None:
        network = MemoryNetwork(latency=0.01)
        self.member = self.make(network, 0, TOKEN)
        self.other = self.make(network, 1, token)

    def make(self, network: MemoryNetwork, number: int, token: str | None) -> ThrottledTransport:
        inner, me = network.transport(signer(number)), signer(number).peer
        made = ThrottledTransport(inner, urgent=())
        if token is not None:
            given = {"admission": admission(me, token), "open_to_all": frozenset({OPEN}), "urgent": ()}
            made = AdmittingTransport(inner, Caps(), **given)

        async def answer(peer: PeerId, body: bytes) -> bytes:
            return b"served"

        for protocol in (CLOSED, OPEN):
            serve_requests(made, protocol, answer, limit=9)
        return made

    async def ask(self, asker: ThrottledTransport, of: ThrottledTransport, protocol: str) -> bytes:
        await asker.connect(of.peer, of.addresses())
        return await request(asker, of.peer, protocol, b"please", limit=9, timeout=5.0)


def on_pair(token: str | None, script) -> None:
    async def main() -> None:
        pair = Pair(token)
        async with pair.member, pair.other:
            await script(pair)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize("token", [None, "another-horse-battery"])
def test_a_stranger_is_served_what_is_open_to_all_and_no_more(token: str | None) -> None:
    async def script(pair: Pair) -> None:
        assert await pair.ask(pair.other, pair.member, OPEN) == b"served"
        with pytest.raises(TransportError):
            await pair.ask(pair.other, pair.member, CLOSED)

    on_pair(token, script)


@pytest.mark.parametrize("token", [None, "another-horse-battery"])
def test_a_stranger_is_asked_for_nothing_either(token: str | None) -> None:
    async def script(pair: Pair) -> None:
        with pytest.raises(PeerUnreachable if token is not None else TransportError):
            await pair.ask(pair.member, pair.other, CLOSED)

    on_pair(token, script)


def test_who_has_the_token_is_served_and_asked() -> None:
    async def script(pair: Pair) -> None:
        assert await pair.ask(pair.other, pair.member, CLOSED) == b"served"
        assert await pair.ask(pair.member, pair.other, CLOSED) == b"served"

    on_pair(TOKEN, script)


def test_a_peer_that_was_restarted_is_met_again_within_ten_seconds() -> None:
    async def script(pair: Pair) -> None:
        assert await pair.ask(pair.other, pair.member, CLOSED) == b"served"
        pair.member.admission = admission(A)  # a new process knows nobody
        with pytest.raises(TransportError):
            await pair.ask(pair.other, pair.member, CLOSED)
        await anyio.sleep(10)
        assert await pair.ask(pair.other, pair.member, CLOSED) == b"served"

    on_pair(TOKEN, script)


# ---- test invite ----
#
# An invite line: whole and unaltered, or one line that says what happened to it.

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


def test_the_line_that_a_peer_prints_is_taken_whole_with_what_the_joiner_must_bring() -> None:
    invite = Invite(bytes(32), ("/ip4/127.0.0.1/tcp/1",))
    assert Invite.parse(f"decentral join {invite} --data 'PATH/TO/my novel'") == invite


def test_an_invite_is_one_short_word_without_a_token_unless_given() -> None:
    line = str(Invite(bytes(32), (ADDRESS,)))
    assert line.isascii()
    assert len(line.split()) == 1
    assert len(line) < 190
    assert Invite.parse(line).token is None


def test_spaces_and_line_breaks_of_a_mail_program_do_not_matter() -> None:
    line = str(INVITE)
    assert Invite.parse(f"\n> {line[:40]}\r\n  {line[40:]} \n".replace("> ", "")) == INVITE


def test_the_whole_line_that_a_peer_prints_is_an_invite_too() -> None:
    assert Invite.parse(f"decentral join {INVITE}\n") == INVITE


def test_every_cut_is_called_cut_or_no_invite() -> None:
    line = str(INVITE)
    for length in range(len(line)):
        complaint = "cut short" if length > len(PREFIX) - 1 else "an invite begins with decentral1:"
        with pytest.raises(InviteError, match=complaint):
            Invite.parse(line[:length])


def test_every_altered_letter_is_noticed() -> None:
    line = str(INVITE)
    for position in range(len(PREFIX), len(line)):
        for other in "Az_":
            if line[position] != other:
                with pytest.raises(InviteError, match=r"altered|cut short|something follows"):
                    Invite.parse(line[:position] + other + line[position + 1 :])


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("", "empty; an invite begins with"),
        ("hello", "hello is not an invite"),
        ("https://example.org/join?run=1", "https://example.org/ is not an invite"),
        ("run.toml", "run.toml is not an invite"),
        ("decentral2:AAAA", "made by another version"),
        ("decentral1:", "cut short"),
        ("decentral1:A", "cut short"),
        (f"{INVITE}AAAA", "something follows its end"),
        (f"{INVITE}é", "characters that do not belong"),
        (f"{INVITE}.", "characters that do not belong|something follows|altered"),
        (f"{INVITE}{INVITE}", "characters that do not belong"),
        (str(INVITE).upper(), "is not an invite"),
        ("x" * 10_000, "10000 characters are too many"),
        ("\x1b[31mdecentral1:", "is not an invite"),
    ],
)
def test_foreign_strings_are_told_apart(line: str, complaint: str) -> None:
    with pytest.raises(InviteError, match=complaint) as caught:
        Invite.parse(line)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 200


@given(st.text(max_size=80), st.booleans())
@settings(max_examples=500, deadline=None)
def test_any_text_gives_an_invite_error_in_one_line(text: str, prefixed: bool) -> None:
    with pytest.raises(InviteError) as caught:
        Invite.parse(PREFIX + text if prefixed else text)
    assert str(caught.value).isprintable()


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
