"""A lease is its peer's word, whoever carries it."""

import dataclasses
import tracemalloc
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decentral.errors import PayloadError
from decentral.wire import messages as m
from decentral.wire.keys import Signer
from decentral.wire.messages import (
    Certificate,
    Commit,
    Lease,
    Record,
    decode,
    encode,
    seal_lease,
    verify_certificate,
    vote_text,
)

SIGNER = Signer(bytes(32))
PLAIN = Lease(
    run=bytes(32),
    peer=SIGNER.peer,
    sequence=5,
    ttl=15,
    addresses=("/ip4/127.0.0.1/tcp/4001", "/ip6/::1/udp/4001/quic-v1"),
    epoch=1,
    round=2,
    digest=bytes([3] * 32),
    state=1,
    uplink=20_000_000,
    version="0.1.0",
)


def test_no_single_changed_bit_of_a_lease_passes() -> None:
    data = encode(seal_lease(PLAIN, SIGNER))
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1 << position % 8
        with pytest.raises(PayloadError):
            decode(bytes(changed))


def test_an_unsigned_lease_cannot_be_sent() -> None:
    with pytest.raises(PayloadError, match="not signed by the peer it names"):
        encode(PLAIN)


@pytest.mark.parametrize(("first", "stop", "part"), [(0, 0, None), (0, 3, range(3)), (2, 65_535, range(2, 65_535))])
def test_a_lease_says_which_fragments_its_peer_trains(first: int, stop: int, part: range | None) -> None:
    lease = seal_lease(dataclasses.replace(PLAIN, first=first, stop=stop), SIGNER)
    read = decode(encode(lease))
    assert isinstance(read, Lease)
    assert read.part == part


@pytest.mark.parametrize(("first", "stop"), [(4, 3), (1, 0)])
def test_a_part_of_nothing_is_no_lease(first: int, stop: int) -> None:
    with pytest.raises(PayloadError, match="which are none"):
        encode(dataclasses.replace(PLAIN, first=first, stop=stop))


def test_a_peer_signs_its_own_lease_only() -> None:
    stranger = Signer(bytes([1] * 32))
    with pytest.raises(PayloadError, match="its own lease only"):
        seal_lease(PLAIN, stranger)
    forged = dataclasses.replace(seal_lease(dataclasses.replace(PLAIN, peer=stranger.peer), stranger), peer=SIGNER.peer)
    with pytest.raises(PayloadError, match="not signed"):
        encode(forged)


@pytest.mark.parametrize(
    "changes",
    [
        {"addresses": ("/ip4/1.2.3.4/tcp/1",) * 17},
        {"addresses": ("/" + "a" * 256,)},
        {"addresses": ("/ip4/\x1b[2J",)},
        {"addresses": ("/dns4/ä",)},
        {"version": "v" * 33},
        {"version": "0.1\n"},
        {"ttl": 2**32},
        {"state": 256},
        {"uplink": -1},
    ],
)
def test_a_lease_that_breaks_a_bound_cannot_be_signed(changes: dict[str, object]) -> None:
    with pytest.raises(PayloadError, match="Lease"):
        seal_lease(dataclasses.replace(PLAIN, **changes), SIGNER)  # type: ignore[arg-type]


# ---- test messages ----
#
# Control messages: one encoding per value, bounds before reading, PayloadError and nothing else.

SIGNERS = sorted((Signer(bytes([i] * 32)) for i in range(6)), key=lambda signer: signer.peer)
PEERS = tuple(signer.peer for signer in SIGNERS)

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
DIGEST = st.binary(min_size=32, max_size=32)
SUMMARY = st.binary(max_size=64)
SIGNATURE = st.binary(min_size=64, max_size=64)
VERSION = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=32)
ADDRESS = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=80)
MEMBERS = st.sets(DIGEST, max_size=6).map(lambda peers: tuple(sorted(peers)))


@st.composite
def refs(draw: st.DrawFn, least: int = 0) -> tuple[m.FrameRef, ...]:
    places = draw(st.sets(st.tuples(DIGEST, U32), min_size=least, max_size=5))
    return tuple(
        m.FrameRef(peer, draw(DIGEST), part, draw(U32), draw(U64), draw(U64), draw(SUMMARY))
        for peer, part in sorted(places)
    )


@st.composite
def partitions(draw: st.DrawFn) -> tuple[tuple[bytes, int, int], ...]:
    owners = sorted(draw(st.sets(DIGEST, min_size=1, max_size=5)))
    sizes = [draw(st.integers(1, 2**40)) for _ in owners]
    return tuple((owner, sum(sizes[:i]), sum(sizes[: i + 1])) for i, owner in enumerate(owners))


@st.composite
def records(draw: st.DrawFn) -> m.Record:
    frames, contributors, partition = draw(refs()), (), ()
    if draw(st.booleans()):
        partition, contributors = draw(partitions()), draw(refs(least=1))
        frames = tuple(m.FrameRef(owner, draw(DIGEST), part, 1, 2) for part, (owner, _, _) in enumerate(partition))
    numbers = (draw(U64), draw(U64), draw(U64), draw(U32), draw(U32))
    hashes, members, following = (draw(DIGEST), draw(DIGEST)), draw(MEMBERS), draw(MEMBERS)
    return m.Record(
        draw(DIGEST), *numbers, *hashes, members, frames, contributors, partition, following, draw(st.booleans())
    )


@st.composite
def promises(draw: st.DrawFn) -> m.Promise:
    accepted = draw(st.none() | records())
    ballot = -1 if accepted is None else draw(st.integers(0, 2**31 - 1))
    proposed = bytes(64) if accepted is None else draw(SIGNATURE)
    return m.Promise(draw(U64), draw(U64), draw(U32), ballot, accepted, proposed, draw(SIGNATURE))


@st.composite
def farewells(draw: st.DrawFn) -> m.Farewell:
    accepted = draw(st.none() | records())
    if accepted is None:
        return m.Farewell(draw(U64), draw(U64), -1, None, bytes(64), bytes(64), draw(SIGNATURE))
    ballot, signatures = draw(st.integers(0, 2**31 - 1)), (draw(SIGNATURE), draw(SIGNATURE), draw(SIGNATURE))
    return m.Farewell(draw(U64), accepted.round, ballot, accepted, *signatures)


@st.composite
def certificates(draw: st.DrawFn) -> m.Certificate:
    return m.Certificate(draw(U32), tuple((peer, draw(SIGNATURE)) for peer in draw(MEMBERS)))


@st.composite
def shown(draw: st.DrawFn) -> tuple[m.Shown, ...]:
    said = (U64, U64, st.integers(-1, 2**31 - 1), DIGEST, SIGNATURE)
    return tuple(m.Shown(peer, *map(draw, said)) for peer in draw(MEMBERS))


@st.composite
def requests(draw: st.DrawFn) -> tuple[m.Asked, ...]:
    return tuple(m.Asked(peer, draw(U64), draw(DIGEST), draw(SIGNATURE)) for peer in draw(MEMBERS))


@st.composite
def leases(draw: st.DrawFn) -> m.Lease:
    signer = draw(st.sampled_from(SIGNERS))
    addresses = tuple(draw(st.lists(ADDRESS, max_size=4)))
    where = (
        draw(U64),
        draw(U64),
        draw(DIGEST),
        draw(st.integers(0, 255)),
        draw(U64),
        draw(VERSION),
    )
    return m.seal_lease(m.Lease(draw(DIGEST), signer.peer, draw(U64), draw(U32), addresses, *where), signer)


MESSAGES = st.one_of(
    st.builds(m.Offer, U64, U64, U32, DIGEST, DIGEST, U64, U32, U64),
    st.builds(m.ReducePlan, U64, U64, U32, U32, refs(least=1), partitions()),
    st.builds(m.Missing, U64, U64, U32, MEMBERS),
    st.builds(m.Proposal, U32, records(), SIGNATURE, shown(), shown(), requests()),
    st.builds(m.Refusal, U64, U64, U32, DIGEST, MEMBERS, st.booleans()),
    st.builds(m.Vote, U64, U64, U32, DIGEST, SIGNATURE),
    st.builds(m.Prepare, U64, U64, U32, shown()),
    promises(),
    st.builds(m.Commit, records(), certificates(), shown()),
    st.builds(m.JoinRequest, U64, DIGEST, SIGNATURE),
    st.just(m.Goodbye()),
    st.builds(m.Behind, U64),
    leases(),
    farewells(),
)


def record(**changes: object) -> m.Record:
    refs = tuple(m.FrameRef(peer, bytes(32), 0, 30, 999) for peer in PEERS[:2])
    plain = m.Record(bytes(32), 1, 2, 3, 0, 0, bytes(32), bytes(32), PEERS[:3], refs, (), (), PEERS[:3], False)
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


@given(MESSAGES)
@settings(max_examples=150, deadline=None)
def test_decoding_and_encoding_again_gives_the_same_value_and_bytes(message: m.Message) -> None:
    data = m.encode(message)
    assert m.decode(data) == message
    assert m.encode(m.decode(memoryview(data))) == data


@given(MESSAGES, st.data())
@settings(max_examples=150, deadline=None)
def test_mutated_messages_give_payload_error_or_a_message_with_those_very_bytes(message: m.Message, data) -> None:
    hostile = bytearray(m.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, max(0, len(hostile) - 1)))
        insert = data.draw(st.binary(max_size=4))
        cut = data.draw(st.integers(0, 4))
        hostile[position : position + cut] = insert
    try:
        again = m.decode(bytes(hostile))
    except PayloadError:
        return
    assert m.encode(again) == bytes(hostile)


@given(MESSAGES)
@settings(max_examples=60, deadline=None)
def test_no_beginning_of_a_message_is_a_message(message: m.Message) -> None:
    data = m.encode(message)
    for length in range(0, len(data), 1 + len(data) // 50):
        with pytest.raises(PayloadError):
            m.decode(data[:length])
    with pytest.raises(PayloadError, match="after its end"):
        m.decode(data + b"\0")


def test_a_huge_count_or_length_allocates_nothing_and_a_message_over_the_bound_is_not_read() -> None:
    before_count = bytes((3, 3)) + bytes(8 + 8 + 4)  # Missing, up to its list of peers
    hostile = [
        before_count + b"\xff\xff\xff\xff",
        before_count + (1024).to_bytes(4, "little"),
        bytes((8, 3)) + b"\xff" * 400,
    ]
    tracemalloc.start()
    try:
        for data in hostile:
            with pytest.raises(PayloadError, match="drop it and its sender"):
                m.decode(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    with pytest.raises(PayloadError, match="655361 bytes"):
        m.decode(bytes((8, 3)) + bytes(m.MAX_MESSAGE_NBYTES - 1))


def test_the_largest_commit_fits_the_bound_and_one_peer_more_is_refused() -> None:
    peers = tuple(i.to_bytes(32, "big") for i in range(m.MAX_PEERS))
    partition = tuple((peer, i, i + 1) for i, peer in enumerate(peers))
    frames = tuple(m.FrameRef(peer, bytes(32), i, 1, 1) for i, peer in enumerate(peers))
    given = tuple(m.FrameRef(peer, bytes(32), 0, 1, 1, 0, bytes(64)) for peer in peers)
    full = record(members=peers, frames=frames, contributors=given, partition=partition, next_members=peers)
    data = m.encode(m.Commit(full, m.Certificate(0, tuple((peer, bytes(64)) for peer in peers))))
    assert len(data) <= m.MAX_MESSAGE_NBYTES
    assert m.decode(data).record == full
    with pytest.raises(PayloadError, match="1025 items, at most 1024"):
        m.encode_record(record(members=(*peers, b"\xff" * 32)))


@pytest.mark.parametrize("number", [12, 13, 14])
def test_the_number_of_a_message_that_went_away_is_not_given_to_another(number: int) -> None:
    with pytest.raises(PayloadError, match=f"message of unknown type {number}"):
        m.decode(bytes((number, m.VERSION)) + bytes(48))


def test_the_place_of_the_fault_is_named() -> None:
    data = m.encode(m.Offer(1, 2, 3, bytes(32), bytes(32), 4, 5, 6))
    with pytest.raises(PayloadError, match=r"Offer.based: cut short: 8 bytes wanted, 7 left"):
        m.decode(data[:-2])


def test_a_summary_of_more_than_64_bytes_is_neither_read_nor_written() -> None:
    data = m.encode(m.Offer(1, 2, 3, bytes(32), bytes(32), 4, 5, 6, 7, bytes(64)))
    assert m.decode(data).summary == bytes(64)
    with pytest.raises(PayloadError, match=r"Offer.summary: 65 bytes, at most 64; drop it and its sender"):
        m.decode(data[:-65] + b"\x41" + bytes(65))
    with pytest.raises(PayloadError, match=r"Offer.summary: 65 bytes, at most 64; nothing was sent"):
        m.encode(m.Offer(1, 2, 3, bytes(32), bytes(32), 4, 5, 6, 7, bytes(65)))


RESULT = (m.FrameRef(PEERS[0], bytes(32), 0, 1, 1),)
SUMMED = (m.FrameRef(PEERS[0], bytes(32), 0, 1, 1, 0, b"a result has nothing to say"),)


@pytest.mark.parametrize(
    "changes",
    [
        {"members": (PEERS[1], PEERS[0])},
        {"members": (PEERS[0], PEERS[0])},
        {"next_members": (PEERS[1], PEERS[0])},
        {"frames": (m.FrameRef(PEERS[1], bytes(32), 0, 1, 1), m.FrameRef(PEERS[0], bytes(32), 0, 1, 1))},
        {"frames": (m.FrameRef(PEERS[0], bytes(32), 1, 1, 1), m.FrameRef(PEERS[0], bytes(32), 1, 1, 1))},
        {"contributors": RESULT},
        {"partition": ((PEERS[0], 0, 5),)},
        {"frames": RESULT, "contributors": RESULT, "partition": ((PEERS[0], 1, 5),)},
        {"frames": RESULT, "contributors": RESULT, "partition": ((PEERS[0], 0, 0),)},
        {"frames": RESULT, "contributors": RESULT, "partition": ((PEERS[0], 0, 5), (PEERS[1], 6, 7))},
        {"frames": RESULT, "contributors": RESULT, "partition": ((PEERS[1], 0, 5),)},
        {"frames": SUMMED, "contributors": RESULT, "partition": ((PEERS[0], 0, 5),)},
        {"frames": (), "contributors": RESULT, "partition": ((PEERS[0], 0, 5),)},
        {"run": bytes(31)},
        {"epoch": -1},
        {"round": 2**64},
        {"fragment": 2**32},
    ],
)
def test_a_record_that_breaks_a_rule_cannot_be_written(changes: dict[str, object]) -> None:
    with pytest.raises(PayloadError, match="nothing was sent"):
        m.encode_record(record(**changes))


def test_a_promise_names_a_ballot_exactly_when_it_carries_a_record() -> None:
    for ballot, accepted in ((-1, record()), (0, None), (-2, record())):
        with pytest.raises(PayloadError, match="accepted ballot"):
            m.encode(m.Promise(1, 2, 3, ballot, accepted, bytes(64), bytes(64)))


def test_every_field_of_a_record_changes_its_hash() -> None:
    other = {
        "run": bytes([1] * 32),
        "epoch": 9,
        "round": 9,
        "outer_step": 9,
        "fragment": 9,
        "plan": 9,
        "previous": bytes([1] * 32),
        "base": bytes([1] * 32),
        "members": PEERS,
        "frames": (),
        "next_members": PEERS,
        "final": True,
    }
    hashes = {record(**{name: value}).hash for name, value in other.items()}
    assert len(hashes | {record().hash}) == len(other) + 1


# ---- test votes ----
#
# A commit is believed for its signatures alone.

VOTERS = PEERS[:5]
RECORD = Record(bytes(32), 1, 2, 3, 0, 0, bytes(32), bytes(32), VOTERS, (), (), (), VOTERS, False)


def vote(signer: Signer, record: Record = RECORD, ballot: int = 4) -> tuple[bytes, bytes]:
    text = vote_text(record.run, record.epoch, record.round, ballot, record.hash)
    return signer.peer, signer.sign(text)


def check(votes: Iterable[tuple[bytes, bytes]], record: Record = RECORD, ballot: int = 4, majority: int = 3) -> None:
    verify_certificate(Commit(record, Certificate(ballot, tuple(votes))), VOTERS, majority)


def test_a_majority_of_true_votes_is_believed() -> None:
    check(map(vote, SIGNERS[:3]))
    check(map(vote, SIGNERS[:5]))


def test_a_vote_counts_once_of_a_voter_and_for_one_record_in_one_ballot() -> None:
    votes, (_, signature) = list(map(vote, SIGNERS[:5])), vote(SIGNERS[2])
    with pytest.raises(PayloadError, match="2 votes, a majority is 3 of 5"):
        check(votes[:2])
    with pytest.raises(PayloadError, match="0 votes"):
        check([], majority=1)
    with pytest.raises(PayloadError, match="there twice"):
        check([votes[0], votes[0], votes[1]])
    with pytest.raises(PayloadError, match="not by one of its voters"):
        check([*votes[:2], vote(Signer(bytes([9] * 32)))])
    for position in range(64):
        changed = signature[:position] + bytes([signature[position] ^ 1]) + signature[position + 1 :]
        with pytest.raises(PayloadError, match="is not signed by it"):
            check([*votes[:2], (PEERS[2], changed)])
    others: list[dict[str, object]] = [
        {"run": bytes([1] * 32)}, {"epoch": 2}, {"round": 3}, {"base": bytes([1] * 32)}, {"final": True},
    ]  # fmt: skip
    for changes in others:
        with pytest.raises(PayloadError, match="is not signed by it"):
            check(votes, dataclasses.replace(RECORD, **changes))  # type: ignore[arg-type]
    with pytest.raises(PayloadError, match="is not signed by it"):
        check(votes, ballot=5)
