"""Frames longer than one answer, and bytes beyond the four gigabytes that 32 bits count."""

from __future__ import annotations

import random

import anyio
import pytest

from decentral.dissemination import broadcast
from decentral.dissemination.reassembly import Reassembly
from decentral.errors import PayloadError
from decentral.transport.memory import MemoryNetwork
from decentral.transport.requests import serve_requests
from decentral.wire.frames import HEADER_NBYTES, FrameKind, Header, seal
from decentral.wire.keys import Signer
from decentral.wire.pieces import WANT_NBYTES, Piece, Want, joined, read_piece, read_want
from tests.kit.relays import ECHO, connected, native

ONE, OTHER = Signer(bytes([1]) * 32), Signer(bytes([2]) * 32)
FRAME = bytes(32)
AT_ONCE = 100
HUGE = (9 << 30) + 12_345  # bytes of a frame: 2.4 billion parameters at 32 bits each


async def asked(held: bytes, want: Want, limit: int = 1 << 16) -> tuple[bytes | None, list[int]]:
    """What comes of a want from a holder of this frame, and how long each answer was."""
    lengths: list[int] = []

    async def answer(peer: bytes, data: bytes) -> bytes:
        found = read_want(data).of(held, AT_ONCE)
        lengths.append(len(found))
        return found

    network = MemoryNetwork()
    asks, holds = network.transport(ONE), network.transport(OTHER)
    serve_requests(holds, broadcast.FETCH, answer, limit=WANT_NBYTES)
    async with connected(asks, holds):
        return await broadcast.fetch(asks, holds.peer, want, limit, AT_ONCE), lengths


async def test_a_frame_longer_than_one_answer_comes_in_several(virtual_time: None) -> None:
    for nbytes in (1, 99, 100, 101, 200, 1234):
        held = random.Random(nbytes).randbytes(nbytes)
        came, lengths = await asked(held, Want(FRAME))
        assert came == held
        assert max(lengths) <= AT_ONCE


async def test_missing_ranges_of_any_length_come_in_answers_that_are_short_enough(virtual_time: None) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        held = rng.randbytes(2000)
        cuts = sorted(rng.sample(range(2000), 2 * rng.randrange(1, 20)))
        missing = joined(list(zip(cuts[::2], cuts[1::2], strict=True)))
        came, lengths = await asked(held, Want(FRAME, missing))
        assert came == b"".join(held[start:stop] for start, stop in missing)
        assert max(lengths) <= AT_ONCE


async def test_a_holder_that_never_ends_is_left_at_the_limit(virtual_time: None) -> None:
    _, lengths = await asked(bytes(1 << 16), Want(FRAME), limit=450)
    assert sum(lengths) == 500


def test_nobody_is_given_more_at_once_than_an_answer_holds() -> None:
    with pytest.raises(PayloadError, match="more than 100 bytes at once"):
        Want(FRAME, ((0, 60), (70, 111))).of(bytes(200), AT_ONCE)


def test_pieces_beyond_four_gigabytes_are_put_where_they_belong() -> None:
    """Memory is taken for what came, not for the frame."""
    header = Header(FrameKind.CONTRIBUTION, bytes(32), 0, 5, 0, 0, 1, 0, bytes(32), ONE.peer, 5, 50)
    head = seal(header, b"x", ONE).data[:HEADER_NBYTES]
    puzzle = Reassembly(lambda header: HUGE)
    places = (0, (1 << 32) - 7, (1 << 33) + 5, HUGE - 10)
    for number, at in enumerate(places):
        piece = read_piece(Piece(head, HUGE, at, False, bytes([number + 1]) * 10).to_bytes())
        assert puzzle.add(piece, ONE.peer) == (True, None)
    (frame,) = puzzle._frames.values()  # its bytes are not copied for a test
    assert [bytes(frame.own.data[at : at + 10]) for at in places] == [bytes([n + 1]) * 10 for n in range(4)]
    gaps = tuple(frame.came.gaps(0, HUGE))
    assert gaps[-1] == ((1 << 33) + 15, HUGE - 10)
    wants = list(read_want(Want(FRAME, gaps).to_bytes()).cut())
    assert sum(stop - start for want in wants for start, stop in want.ranges) == HUGE - 40
    assert all(sum(stop - start for start, stop in want.ranges) <= 1 << 30 for want in wants)


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_one_stream_carries_more_than_four_gigabytes() -> None:
    """Windows, counters and nonces of the muxer and of Noise go on beyond 32 bits."""
    piece, count = random.Random(0).randbytes(1 << 20), 4500
    got: list[int] = []
    over = anyio.Event()

    async def take(stream) -> None:
        for _ in range(count):
            got.append(len(await stream.receive_exactly(1 << 20)))
        assert await stream.receive_exactly(5) == b"after"
        over.set()

    async with connected(native(), native(), serves=take) as (a, b):
        stream = await a.open(b.peer, ECHO)
        for _ in range(count):
            await stream.send(piece)
        await stream.send(b"after")
        await over.wait()
        await stream.aclose()
    assert sum(got) == 4500 << 20
