"""The bytes of every frame kind and message, kept as hex: peers of other days must read the same.

A file that changes is a new wire version. A new message adds its example here and the file that the failing test
prints.
"""

from pathlib import Path

import pytest

from decentral.swarm.invite import Invite
from decentral.transport.paths import ANSWERED, NOT_TRIED, DialbackAnswer, Question
from decentral.wire import messages as m
from decentral.wire.codecs import from_bytes, to_bytes
from decentral.wire.frames import HEADER_NBYTES, FrameKind, Header, claims_of, parse, seal
from decentral.wire.keys import Signer
from decentral.wire.pieces import Piece, Want, read_piece, read_want

FOLDER = Path(__file__).parent
SIGNERS = sorted((Signer(bytes([i] * 32)) for i in range(1, 4)), key=lambda signer: signer.peer)
PEERS = tuple(signer.peer for signer in SIGNERS)
RUN, BASE, PREVIOUS = (bytes([i] * 32) for i in (0xAA, 0xBB, 0xCC))
FRAMES = tuple(bytes([0xF0 + i] * 32) for i in range(4))
SUMMARY = bytes.fromhex("0000803f0000c03f")  # two numbers of a method


def _refs(outer_step: int) -> tuple[m.FrameRef, ...]:
    """Contributions: one in time with nothing to say, one that is older and says something."""
    said = (
        (PEERS[0], FRAMES[0], 0, 30, 15360, outer_step, b""),
        (PEERS[1], FRAMES[1], 0, 30, 15361, outer_step - 2, SUMMARY),
    )
    return tuple(m.FrameRef(*fields) for fields in said)


RESULTS = tuple(m.FrameRef(peer, FRAMES[i], i, 30, 15360 + i, 17) for i, peer in enumerate(PEERS[:2]))
GATHERED = m.Record(RUN, 1, 17, 16, 0, 0, PREVIOUS, BASE, PEERS, _refs(16), (), (), PEERS[:2], False)
PARTITION = ((PEERS[0], 0, 4096), (PEERS[1], 4096, 5000))
REDUCED = m.Record(RUN, 2, 18, 17, 1, 65536, PREVIOUS, BASE, PEERS, RESULTS, _refs(17), PARTITION, PEERS, True)
TEXT = m.vote_text(RUN, 1, 17, 2, GATHERED.hash)
CERTIFICATE = m.Certificate(2, tuple((signer.peer, signer.sign(TEXT)) for signer in SIGNERS[:2]))
PROMISE_TEXT = m.promise_text(RUN, 1, 17, 2, -1, bytes(32))
FAREWELL_TEXT = m.farewell_text(RUN, 1, 17, 2, GATHERED.hash)
SHOWN = tuple(m.Shown(signer.peer, 1, 17, 2, GATHERED.hash, signer.sign(FAREWELL_TEXT)) for signer in SIGNERS[:2])
REQUESTS = (m.Asked(PEERS[2], 16, BASE, SIGNERS[2].sign(m.join_text(RUN, 16, BASE))),)
LEASE = m.Lease(RUN, PEERS[0], 7, 15, ("/ip4/192.0.2.1/tcp/4001",), 1, 17, BASE, 2, 20_000_000, "0.1.0")

MESSAGES: dict[str, m.Message] = {
    "offer": m.Offer(1, 17, 0, BASE, FRAMES[0], 4344, 30, 15360, 16),
    "offer_of_older_progress": m.Offer(1, 17, 0, BASE, FRAMES[0], 4344, 30, 15360, 14, SUMMARY),
    "plan": m.ReducePlan(2, 18, 1, 65536, _refs(17), PARTITION),
    "missing": m.Missing(2, 18, 65536, PEERS[1:]),
    "proposal": m.Proposal(1, GATHERED, SIGNERS[1].sign(TEXT)),
    "vote": m.Vote(1, 17, 2, GATHERED.hash, SIGNERS[0].sign(TEXT)),
    "prepare": m.Prepare(1, 17, 2),
    "promise_of_nothing": m.Promise(1, 17, 2, -1, None, m.NO_SIGNATURE, SIGNERS[0].sign(PROMISE_TEXT)),
    "promise": m.Promise(2, 18, 2, 1, REDUCED, SIGNERS[1].sign(TEXT), SIGNERS[0].sign(PROMISE_TEXT)),
    "commit": m.Commit(GATHERED, CERTIFICATE),
    "join_request": m.JoinRequest(16, BASE, SIGNERS[0].sign(m.join_text(RUN, 16, BASE))),
    "goodbye": m.Goodbye(),
    "behind": m.Behind(41),
    "lease": m.seal_lease(LEASE, SIGNERS[0]),
    "farewell_of_nothing": m.Farewell(1, 17, -1, None, m.NO_SIGNATURE, m.NO_SIGNATURE, SIGNERS[0].sign(FAREWELL_TEXT)),
    "farewell": m.Farewell(
        1, 17, 2, GATHERED, SIGNERS[1].sign(TEXT), SIGNERS[0].sign(TEXT), SIGNERS[0].sign(FAREWELL_TEXT)
    ),
    "proposal_with_all_it_shows": m.Proposal(3, GATHERED, SIGNERS[1].sign(TEXT), SHOWN, SHOWN[:1], REQUESTS),
    "commit_with_a_farewell": m.Commit(GATHERED, CERTIFICATE, SHOWN[:1]),
    "prepare_that_shows_a_promise": m.Prepare(1, 17, 2, SHOWN[:1]),
    "refusal": m.Refusal(1, 17, 2, GATHERED.hash, PEERS[1:], True),
}
RECORDS = {"record_of_a_gather": GATHERED, "record_of_a_reduce": REDUCED}
DIALBACKS = {
    "dialback_question": Question(4001),
    "dialback_answer": DialbackAnswer("/ip4/192.0.2.1/tcp/4001", ANSWERED, 1_700_000_000_000),
    "dialback_answer_of_a_relayed_peer": DialbackAnswer("", NOT_TRIED, 1_700_000_000_000),
}
WANTS = {
    "want": Want(FRAMES[0]),
    "want_of_two_ranges": Want(FRAMES[1], ((0, 65536), (3_000_000_000, 2**63))),
}
CLAIMS = claims_of(17, b"norm")
HEADERS = {
    f"frame_{kind.name.lower()}": Header(kind, RUN, 1, 17, 2, 1, 3, 65537, BASE, PEERS[0], 30, 15360, claims=CLAIMS)
    for kind in FrameKind
}
BODY = b"sixteen bytes..."


def _encoded() -> dict[str, bytes]:
    found = {name: m.encode(message) for name, message in MESSAGES.items()}
    found |= {name: m.encode_record(record) for name, record in RECORDS.items()}
    found |= {name: to_bytes(message) for name, message in DIALBACKS.items()}
    found |= {name: seal(header, BODY, SIGNERS[0]).data for name, header in HEADERS.items()}
    found |= {name: piece.to_bytes() for name, piece in _pieces().items()}
    found |= {name: want.to_bytes() for name, want in WANTS.items()}
    return found


def _pieces() -> dict[str, Piece]:
    frame = seal(HEADERS["frame_contribution"], BODY, SIGNERS[0]).data
    parts = {"piece": (0, 282, False), "piece_to_be_passed_on": (282, len(frame), True)}
    return {
        name: Piece(frame[:HEADER_NBYTES], len(frame), start, pass_on, frame[start:stop])
        for name, (start, stop, pass_on) in parts.items()
    }


def _golden(name: str) -> bytes:
    path = FOLDER / f"{name}.hex"
    assert path.exists(), f"{path.name} should be: {_encoded()[name].hex()}"
    return bytes.fromhex(path.read_text(encoding="ascii"))


@pytest.mark.parametrize("name", _encoded())
def test_the_bytes_are_as_they_always_were(name: str) -> None:
    assert _encoded()[name].hex() == _golden(name).hex()


@pytest.mark.parametrize("name", MESSAGES)
def test_a_golden_message_is_read_and_written_again_unchanged(name: str) -> None:
    golden = _golden(name)
    assert m.decode(golden) == MESSAGES[name]
    assert m.encode(m.decode(golden)) == golden


@pytest.mark.parametrize("name", RECORDS)
def test_a_golden_record_is_read_and_written_again_unchanged(name: str) -> None:
    golden = _golden(name)
    assert m.decode_record(golden) == RECORDS[name]
    assert m.encode_record(m.decode_record(golden)) == golden


@pytest.mark.parametrize("name", DIALBACKS)
def test_a_golden_dialback_is_read_and_written_again_unchanged(name: str) -> None:
    golden = _golden(name)
    assert from_bytes(type(DIALBACKS[name]), golden) == DIALBACKS[name]
    assert to_bytes(from_bytes(type(DIALBACKS[name]), golden)) == golden


@pytest.mark.parametrize("name", _pieces())
def test_a_golden_piece_is_read_and_written_again_unchanged(name: str) -> None:
    golden = _golden(name)
    assert read_piece(golden) == _pieces()[name]
    assert read_piece(golden).to_bytes() == golden


@pytest.mark.parametrize("name", WANTS)
def test_a_golden_want_is_read_and_written_again_unchanged(name: str) -> None:
    golden = _golden(name)
    assert read_want(golden) == WANTS[name]
    assert read_want(golden).to_bytes() == golden


@pytest.mark.parametrize("name", HEADERS)
def test_a_golden_frame_is_read_and_written_again_unchanged(name: str) -> None:
    golden = _golden(name)
    frame = parse(golden, lambda header: len(BODY) if header == HEADERS[name] else 0)
    assert frame.header == HEADERS[name]
    assert frame.body == BODY
    assert frame.data == golden


def test_every_message_and_kind_has_a_golden_file_and_every_file_an_example() -> None:
    assert {path.stem for path in FOLDER.glob("*.hex")} == set(_encoded())
    assert {type(message) for message in MESSAGES.values()} == set(m.Message.__args__)


def test_the_sizes_are_the_documented_ones() -> None:
    assert HEADER_NBYTES == 280
    assert len(m.encode(MESSAGES["vote"])) == 118
    assert len(m.encode(MESSAGES["offer"])) == 115


def test_the_golden_commit_is_believed_and_the_hash_of_its_record_is_as_always() -> None:
    m.verify_certificate(m.decode(_golden("commit")), PEERS, 2)
    assert GATHERED.hash.hex() == "ff59e18c1621c5fc2463a506d9f72b29ff06bc9c337da73384f956cb68995ec7"


def test_the_golden_invite_is_as_always() -> None:
    invite = Invite(RUN, ("/ip4/192.0.2.1/tcp/4001",), "word")
    line = (
        "decentral1:RACqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqgEAAAAXAC9pcDQvMTkyLjAuMi4xL3RjcC80MDAxAQQAd29yZJtzjpY"
    )
    assert str(invite) == line
    assert Invite.parse(line) == invite
