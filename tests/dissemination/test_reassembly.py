"""What is on its way is not asked for again, and what stands still is."""

from __future__ import annotations

import random
from dataclasses import replace

import anyio
import psutil
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from decentral.dissemination.reassembly import (
    NOTHING_CAME,
    PAUSE,
    SCATTERED,
    SMALLEST_PIECE,
    Arrivals,
    RangeSet,
    Reassembly,
)
from decentral.errors import PayloadError
from decentral.wire.frames import HEADER_NBYTES, Frame, FrameKind, Header, seal
from decentral.wire.keys import Signer
from decentral.wire.pieces import MOST, PIECE_HEAD_NBYTES, Piece, Want, joined, read_piece, read_want

ALICE, BOB = b"a" * 32, b"b" * 32


def push(arrivals, pieces, pause):
    """``pieces`` pieces of a push of alice, ``pause`` seconds apart."""

    async def pushing(*, task_status):
        with arrivals.push(ALICE) as on_bytes:
            task_status.started()
            for _ in range(pieces):
                await anyio.sleep(pause)
                on_bytes(1000)

    return pushing


@pytest.mark.parametrize(
    ("pieces", "pause", "seconds"),
    [
        pytest.param(5, 1.0, 5.0, id="it is waited for while it moves"),
        pytest.param(5, PAUSE + 1, PAUSE, id="it is given up when it stands still"),
        pytest.param(0, 0.0, 0.0, id="there is none any more"),
    ],
)
async def test_a_push_is_waited_for_as_long_as_it_moves(pieces, pause, seconds, virtual_time):
    arrivals = Arrivals()
    async with anyio.create_task_group() as group:
        await group.start(push(arrivals, pieces, pause))
        await arrivals.wait_for_push(BOB)  # what others push is not waited for
        assert anyio.current_time() == 0.0
        await arrivals.wait_for_push(ALICE)
        group.cancel_scope.cancel()
    assert anyio.current_time() == seconds


async def test_a_push_is_given_up_at_a_time_that_comes_however_it_is_rounded(virtual_time):
    """At this one ``now - moved`` was less than the pause for ever, and nothing else ever ran (seed 29)."""
    arrivals, moved = Arrivals(), 6.586034147462194
    assert moved + PAUSE - moved < PAUSE
    await anyio.sleep_until(moved)
    with arrivals.push(ALICE), trio.fail_after(60):
        await arrivals.wait_for_push(ALICE)
    assert anyio.current_time() == moved + PAUSE


def test_a_frame_is_fetched_once_at_a_time():
    arrivals = Arrivals()
    with arrivals.fetch(b"frame") as first, arrivals.fetch(b"frame") as second, arrivals.fetch(b"other") as other:
        assert (first, second, other) == (True, False, True)
    with arrivals.fetch(b"frame") as again:
        assert again


# ---- reassembly ----
#
# Frames in pieces: whole from any order, and nothing kept, changed or overrun by what a stranger or a liar sends.

SIGNER, OTHER = Signer(bytes(32)), Signer(bytes([1] * 32))
BODY = random.Random(1).randbytes(1000)


def frame(body: bytes = BODY, round_: int = 5, signer: Signer = SIGNER) -> Frame:
    run = bytes(32)
    return seal(Header(FrameKind.CONTRIBUTION, run, 0, round_, 0, 0, 1, 0, run, signer.peer, 5, 50), body, signer)


def pieces(of: Frame, size: int = 100) -> list[Piece]:
    data = of.data
    cuts = range(0, len(data), size)
    return [Piece(data[:HEADER_NBYTES], len(data), at, at % 200 == 0, data[at : at + size]) for at in cuts]


def at_most(nbytes: int = 1000) -> Reassembly:
    return Reassembly(lambda header: nbytes)


@pytest.mark.parametrize("seed", range(5))
def test_pieces_make_the_frame_in_any_order_and_each_counts_once(seed):
    parts = pieces(frame()) * 2
    random.Random(seed).shuffle(parts)
    puzzle, wholes, fresh = at_most(), [], 0
    for part in parts:
        new, whole = puzzle.add(read_piece(part.to_bytes()), OTHER.peer)
        fresh += new
        wholes += [] if whole is None else [whole]
    assert wholes == [frame().data]
    assert fresh == len(parts) // 2


def test_frames_of_two_senders_and_of_two_rounds_do_not_mix():
    frames = [frame(), frame(signer=OTHER), frame(round_=6)]
    puzzle, wholes = at_most(), []
    for parts in zip(*map(pieces, frames), strict=True):
        wholes += [whole for part in parts if (whole := puzzle.add(part, OTHER.peer)[1]) is not None]
    assert wholes == [one.data for one in frames]


def test_nothing_is_kept_for_a_header_that_nobody_signed():
    puzzle, part = at_most(), pieces(frame())[0]
    forged = replace(part, head=part.head[:-1] + bytes([part.head[-1] ^ 1]))
    with pytest.raises(PayloadError, match="not signed"):
        puzzle.add(forged, OTHER.peer)
    assert puzzle.add(part, OTHER.peer) == (True, None)


def test_a_frame_takes_memory_for_the_bytes_that_came_and_not_for_those_that_its_pieces_announce():
    large = 1 << 28
    puzzle, part, process = at_most(large), pieces(frame())[0], psutil.Process()
    before = process.memory_info().rss
    assert puzzle.add(replace(part, nbytes=large), OTHER.peer) == (True, None)
    assert process.memory_info().rss - before < large // 16


@pytest.mark.parametrize("nbytes", [HEADER_NBYTES - 1, HEADER_NBYTES + 1001, 2**64 - 1])
def test_nothing_is_allocated_for_more_than_the_schema_allows_or_less_than_a_header(nbytes):
    part = replace(pieces(frame())[0], nbytes=nbytes)
    with pytest.raises(PayloadError, match="the schema allows 1280"):
        at_most().add(part, OTHER.peer)


def test_a_header_that_belongs_to_nothing_here_is_refused_before_its_signature_is_looked_at():
    def nothing(header: Header) -> int:
        raise PayloadError("no such round")

    with pytest.raises(PayloadError, match="no such round"):
        Reassembly(nothing).add(pieces(frame())[0], OTHER.peer)


def test_a_second_frame_of_one_sender_in_a_round_is_refused():
    puzzle = at_most()
    puzzle.add(pieces(frame())[0], OTHER.peer)
    with pytest.raises(PayloadError, match="second frame"):
        puzzle.add(pieces(frame(BODY[::-1]))[1], OTHER.peer)


def test_another_size_is_refused():
    puzzle, parts = at_most(), pieces(frame())
    puzzle.add(parts[0], OTHER.peer)
    with pytest.raises(PayloadError, match="in a frame of 1280"):
        puzzle.add(replace(parts[1], nbytes=1247), OTHER.peer)


@pytest.mark.parametrize("seed", range(20))
def test_pieces_that_were_cut_in_several_ways_make_the_frame_when_every_byte_came(seed):
    """An owner that learns its uplink in the middle cuts the rest anew; what was under way comes in both ways.

    Counted by where they begin, they were whole with bytes missing, and all that others brought was dropped.
    """
    rng, whole = random.Random(seed), frame()
    parts = [part for size in (100, 64, 7, 330) for part in rng.sample(pieces(whole, size), len(pieces(whole, size)))]
    puzzle, wholes, came = at_most(), [], set()
    for part in rng.sample(parts, len(parts)):
        _, found = puzzle.add(part, rng.choice([SIGNER.peer, OTHER.peer]))
        came |= set(range(part.start, part.start + len(part.data)))
        assert (found is not None) == (len(came) == len(whole.data) and not wholes)
        wholes += [] if found is None else [found]
    assert wholes == [whole.data]


def test_what_came_first_from_others_stays_and_crumbs_are_refused():
    large = frame(bytes(1 << 20))
    head, nbytes = large.data[:HEADER_NBYTES], len(large.data)
    puzzle = at_most(1 << 20)
    assert puzzle.add(Piece(head, nbytes, 10, False, b"first"), OTHER.peer)[0]
    assert not puzzle.add(Piece(head, nbytes, 11, False, b"IRS"), OTHER.peer)[0]
    assert puzzle.add(Piece(head, nbytes, 8, False, b"SECOND IS LATE"), OTHER.peer)[0]
    assert puzzle.part(5, SIGNER.peer).data[8:22] == b"SEfirst" + b"IS LATE"
    for number in range(SCATTERED + nbytes // SMALLEST_PIECE):
        puzzle.add(Piece(head, nbytes, 100 + 2 * number, False, b"x"), OTHER.peer)
    with pytest.raises(PayloadError, match="crumbs"):
        puzzle.add(Piece(head, nbytes, nbytes - 1, False, b"x"), OTHER.peer)


def test_a_frame_that_its_owner_began_anew_takes_the_place_of_the_first():
    puzzle, again = at_most(), frame(BODY[::-1])
    puzzle.add(pieces(frame())[0], SIGNER.peer)
    wholes = [puzzle.add(part, SIGNER.peer)[1] for part in pieces(again)]
    assert wholes[-1] == again.data


@pytest.mark.parametrize("size", [100, 70])
@pytest.mark.parametrize("seed", range(5))
def test_nobody_spoils_what_an_owner_sends_itself(seed, size):
    """Forged pieces, cut as the owner's are or otherwise, come between, before and after the owner's."""
    good = [(part, SIGNER.peer) for part in pieces(frame())]
    bad = [(replace(part, data=bytes(len(part.data))), OTHER.peer) for part in pieces(frame(), size)]
    parts = good + bad
    random.Random(seed).shuffle(parts)
    puzzle, wholes = at_most(), []
    for part, peer in parts:
        whole = puzzle.add(part, peer)[1]
        while whole is not None and whole != frame().data:
            wholes.append(whole)
            whole = puzzle.wrong(part.head)
        if whole is not None:
            wholes.append(whole)
            puzzle.right(part.head)
    assert wholes[-1] == frame().data
    assert len(wholes) <= 2


def test_what_comes_from_an_owner_while_a_forged_whole_is_looked_at_is_not_lost():
    puzzle, parts = at_most(), pieces(frame())
    for part in parts:
        forged = puzzle.add(replace(part, data=bytes(len(part.data))), OTHER.peer)[1]
    assert forged is not None
    assert [puzzle.add(part, SIGNER.peer)[1] for part in parts] == [None] * len(parts)
    assert puzzle.wrong(parts[0].head) == frame().data


def test_an_owner_whose_own_bytes_are_wrong_is_not_listened_to_again():
    puzzle, parts = at_most(), pieces(frame())
    wrong = [replace(part, data=bytes(len(part.data))) for part in parts]
    assert [puzzle.add(part, SIGNER.peer)[1] is None for part in wrong] == [True] * (len(parts) - 1) + [False]
    assert puzzle.wrong(parts[0].head) is None
    assert [puzzle.add(part, peer) for part in parts for peer in (SIGNER.peer, OTHER.peer)] == [(False, None)] * 26


@pytest.mark.parametrize("seed", range(5))
def test_a_part_filled_with_the_bytes_that_it_lacks_is_the_frame(seed):
    """From its owner, from others, of both: overlapping, with gaps, at any place."""
    rng, whole = random.Random(seed), frame()
    data, puzzle = whole.data, at_most()
    for part in rng.sample(pieces(whole), rng.randrange(1, 12)):
        puzzle.add(part, rng.choice([SIGNER.peer, OTHER.peer]))
    came = puzzle.part(5, SIGNER.peer)
    answer = Want(whole.hash, came.missing).of(data)
    assert len(answer) < len(data)
    assert came.complete(answer, whole.hash) == data
    assert came.complete(answer[:-1], whole.hash) is None
    assert came.complete(bytes(len(answer)), whole.hash) is None


def test_there_is_no_part_of_what_nobody_sent_what_is_whole_and_what_is_past():
    puzzle, whole = at_most(), frame()
    assert puzzle.part(5, SIGNER.peer) is None
    for part in pieces(whole):
        puzzle.add(part, OTHER.peer)
    assert puzzle.part(5, SIGNER.peer) is None
    puzzle.right(pieces(whole)[0].head)
    assert puzzle.part(5, SIGNER.peer) is None
    puzzle.add(pieces(frame(round_=6))[0], SIGNER.peer)
    assert puzzle.part(6, SIGNER.peer) is not None
    puzzle.forget_before(7)
    assert puzzle.part(6, SIGNER.peer) is None


def test_a_part_with_a_forged_piece_does_not_become_the_frame_and_the_whole_answer_does():
    puzzle, whole = at_most(), frame()
    good, bad = pieces(whole)[:2]
    puzzle.add(good, SIGNER.peer)
    puzzle.add(replace(bad, data=bytes(len(bad.data))), OTHER.peer)
    came = puzzle.part(5, SIGNER.peer)
    assert came.complete(Want(whole.hash, came.missing).of(whole.data), whole.hash) is None
    assert NOTHING_CAME.complete(whole.data, whole.hash) == whole.data


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 9)), min_size=1, max_size=200), st.integers(1, 600))
def test_ranges_are_counted_once_however_they_overlap_and_joined_where_they_are_nearest(found, nbytes):
    coverage, came = RangeSet(), set()
    for start, length in found:
        fresh = set(range(start, start + length)) - came
        gaps = coverage.gaps(start, start + length)
        assert [byte for begin, end in gaps for byte in range(begin, end)] == sorted(fresh)
        coverage.add(start, start + length)
        came |= fresh
        assert coverage.nbytes == len(came)
    assert [byte for begin, end in coverage.ranges() for byte in range(begin, end)] == sorted(came)
    assert len(coverage) == sum(byte - 1 not in came for byte in came)
    missing = joined(coverage.gaps(0, nbytes))
    assert read_want(Want(bytes(32), missing).to_bytes()).ranges == missing
    lacking, asked = set(range(nbytes)) - came, {byte for start, stop in missing for byte in range(start, stop)}
    assert asked >= lacking
    assert asked == lacking or len(missing) == MOST


def test_what_is_past_is_forgotten_and_a_whole_frame_keeps_no_bytes():
    puzzle = at_most()
    for part in pieces(frame()):
        puzzle.add(part, OTHER.peer)
    puzzle.right(part.head)
    assert [(len(kept.own.data), kept.others) for kept in puzzle._frames.values()] == [(0, None)]
    assert puzzle.add(pieces(frame())[3], OTHER.peer) == (False, None)
    puzzle.forget_before(6)
    assert not puzzle._frames


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "piece of 0 bytes"),
        (bytes(PIECE_HEAD_NBYTES), "its head alone"),
        (bytes(PIECE_HEAD_NBYTES - 1) + b"\2x", "flag byte 2"),
        (bytes(PIECE_HEAD_NBYTES) + b"x", "ends at 1 of a frame of 0 bytes"),
        (bytes(HEADER_NBYTES) + b"\1" + bytes(16) + b"x", "magic"),
    ],
)
def test_rubbish_is_no_piece(data, words):
    with pytest.raises(PayloadError, match=words):
        read_piece(data)
