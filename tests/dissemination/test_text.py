"""A run's text from those who have it, in memory and under virtual time: liars, stalls, kills, hostile bytes."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import anyio
import pytest
import trio
import trio.testing

from decentral.coding import zstd
from decentral.dissemination import text as text_module
from decentral.dissemination.text import (
    NUMBER,
    TEXT,
    TIMEOUT,
    TextDonor,
    TextFetch,
    TextFile,
    from_form,
    list_chunks,
    list_digest,
    to_form,
)
from decentral.errors import PayloadError, TransportError
from decentral.flow.waiting import inline
from decentral.manifest.terms import SharedText
from decentral.state.snapshot import CHUNK_NBYTES
from decentral.transport.memory import MemoryNetwork
from decentral.transport.requests import serve_requests
from decentral.wire.keys import Signer

WORDS = [bytes([97 + n % 26] * (3 + n % 7)) for n in range(60)]
WHOLE = b" ".join(random.Random(1).choices(WORDS, k=400_000))  # 2.8 MB: eleven chunks, the last one short
LIST = list_chunks([WHOLE])
TERMS = SharedText(nbytes=len(WHOLE), chunks=list_digest(LIST, len(WHOLE)))
CHUNKS = len(LIST) // 32
Answer = Callable[[bytes, bytes], Awaitable[bytes]]
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def chunk(number: int) -> bytes:
    return WHOLE[number * CHUNK_NBYTES : (number + 1) * CHUNK_NBYTES]


def donor_of(text: bytes) -> TextDonor:
    donor = TextDonor(MemoryNetwork().transport(Signer(bytes(32))), TERMS, offload=inline)
    donor.text = memoryview(text)
    return donor


class World:
    """Who joins without the text, and members: honest ones, and ones that answer as a test says."""

    def __init__(self, path: Path, *answers: Answer | None) -> None:
        self.network = MemoryNetwork(latency=0.04)
        me, *others = (Signer(bytes([n]) * 32) for n in range(len(answers) + 1))
        self.me = self.network.transport(me)
        self.members = [self.network.transport(signer) for signer in others]
        self.asked: list[tuple[int, bytes]] = []  # honest member, question
        self.shown: list[tuple[int, int]] = []
        self.dropped: list[bytes] = []
        for place, (member, answer) in enumerate(zip(self.members, answers, strict=True)):
            if answer is not None:
                serve_requests(member, TEXT, answer, limit=NUMBER.size)
                continue
            serve_requests(member, TEXT, self._noted(place, donor_of(WHOLE)), limit=NUMBER.size)
        self.fetch = TextFetch(
            self.me,
            TERMS,
            path,
            told=lambda here, peers: self.shown.append((here, peers)),
            dropped=lambda peer, why: self.dropped.append(peer),
            offload=inline,
        )

    def _noted(self, place: int, donor: TextDonor) -> Answer:
        async def answer(peer: bytes, data: bytes) -> bytes:
            self.asked.append((place, data))
            return await donor.answer(peer, data)

        return answer

    def run(self, patience: float = float("inf"), *, tries: int = 1) -> None:
        """Fetch, for so many seconds, so many times until all is here; raises what the last one raises."""

        async def main() -> None:
            async with AsyncExitStack() as stack:
                for transport in (self.me, *self.members):
                    await stack.enter_async_context(transport)
                for member in self.members:
                    await self.me.connect(member.peer, member.addresses())
                with anyio.move_on_after(patience):
                    for left in reversed(range(tries)):
                        with suppress(*(() if left == 0 else (TransportError,))):
                            return await self.fetch.run(lambda: [member.peer for member in self.members])

        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


async def lie_about_chunks(peer: bytes, data: bytes) -> bytes:
    return to_form(bytes(CHUNK_NBYTES)) if data else LIST


async def lie_about_the_list(peer: bytes, data: bytes) -> bytes:
    return bytes(len(LIST))


async def stall(peer: bytes, data: bytes) -> bytes:
    await anyio.sleep_forever()
    raise AssertionError


async def swell(peer: bytes, data: bytes) -> bytes:
    return bytes(64 * len(LIST)) if not data else bytes(2 * CHUNK_NBYTES)


# ---- the text comes ----


def test_it_comes_whole_and_packed_and_every_chunk_is_told(tmp_path: Path) -> None:
    world = World(tmp_path / "text", None, None)
    world.run()
    assert (tmp_path / "text").read_bytes() == WHOLE
    assert world.shown[0] == (0, 0)
    assert world.shown[-1] == (len(WHOLE), 2)
    assert world.me.traffic.total.received < 0.5 * len(WHOLE)
    assert {place for place, question in world.asked if question} == {0, 1}, "both give some of it"


@pytest.mark.parametrize("bad", [lie_about_chunks, lie_about_the_list, swell])
def test_a_member_that_lies_is_left_for_another_and_named_once(tmp_path: Path, bad: Answer) -> None:
    world = World(tmp_path / "text", bad, None)
    world.run()
    assert (tmp_path / "text").read_bytes() == WHOLE
    assert set(world.dropped) <= {world.members[0].peer}
    assert len(world.dropped) <= 1
    assert world.shown[-1] == (len(WHOLE), 1)


def test_a_member_that_stalls_is_left_for_another(tmp_path: Path) -> None:
    world = World(tmp_path / "text", stall, None)
    world.run()
    assert (tmp_path / "text").read_bytes() == WHOLE
    assert world.dropped == [], "it may answer another time"


def test_members_that_never_answer_cost_seconds_each_and_not_a_whole_patience(tmp_path: Path) -> None:
    world = World(tmp_path / "text", stall, stall, stall, stall, None)
    world.run(patience=TIMEOUT)
    assert (tmp_path / "text").read_bytes() == WHOLE


async def refuse(peer: bytes, data: bytes) -> bytes:
    raise TransportError("still joining")


@pytest.mark.parametrize("bad", [stall, refuse])
def test_members_that_fail_are_not_asked_before_others_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: Answer
) -> None:
    monkeypatch.setattr(text_module, "GIVERS", 1)
    world = World(tmp_path / "text", bad, bad, bad, None)
    world.run(tries=4)
    assert (tmp_path / "text").read_bytes() == WHOLE


@pytest.mark.parametrize("bad", [lie_about_chunks, lie_about_the_list, swell])
def test_liars_alone_give_nothing_and_nothing_of_theirs_is_kept(tmp_path: Path, bad: Answer) -> None:
    world = World(tmp_path / "text", bad, bad)
    with pytest.raises(TransportError):
        world.run()
    kept = (tmp_path / "text").read_bytes() if (tmp_path / "text").exists() else b""
    assert not any(kept), "at most the room for it was made"


def test_what_came_before_a_kill_is_not_asked_for_again(tmp_path: Path) -> None:
    first = World(tmp_path / "text", None)
    first.network.set_uplink(first.members[0].peer, 100_000.0)
    first.run(patience=5.0)
    assert 0 < first.shown[-1][0] < len(WHOLE)
    again = World(tmp_path / "text", None)
    again.run()
    here, peers = again.shown[0]
    assert (first.shown[-1][0] <= here, peers) == (True, 0)
    assert len([1 for _, question in again.asked if question]) == CHUNKS - here // CHUNK_NBYTES
    assert (tmp_path / "text").read_bytes() == WHOLE


# ---- what is on the disk ----


def test_of_a_file_that_is_there_right_chunks_count_and_others_are_missing(tmp_path: Path) -> None:
    damaged = bytearray(WHOLE[: 3 * CHUNK_NBYTES + 5])
    damaged[CHUNK_NBYTES] ^= 1
    (tmp_path / "text").write_bytes(damaged)
    file = TextFile(tmp_path / "text", LIST, len(WHOLE))
    assert file.missing() == [1, *range(3, CHUNKS)]
    file.add(1, chunk(1))
    file.add(CHUNKS - 1, chunk(CHUNKS - 1))
    assert TextFile(tmp_path / "text", LIST, len(WHOLE)).missing() == list(range(3, CHUNKS - 1))


def test_a_file_that_is_too_long_is_cut(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(WHOLE + b"more")
    assert TextFile(tmp_path / "text", LIST, len(WHOLE)).missing() == []
    assert (tmp_path / "text").read_bytes() == WHOLE


@pytest.mark.parametrize(("number", "data"), [(0, chunk(1)), (0, chunk(0)[:-1]), (0, b""), (CHUNKS, chunk(0))])
def test_what_is_not_the_chunk_is_not_written(tmp_path: Path, number: int, data: bytes) -> None:
    file = TextFile(tmp_path / "text", LIST, len(WHOLE))
    before = (tmp_path / "text").read_bytes()
    with pytest.raises(PayloadError):
        file.add(number, data)
    assert (tmp_path / "text").read_bytes() == before
    assert file.here == 0


# ---- bytes on their way ----


@pytest.mark.parametrize("size", [999, CHUNK_NBYTES, CHUNK_NBYTES + 1, len(WHOLE)])
def test_the_list_is_the_same_however_the_text_is_cut(size: int) -> None:
    assert list_chunks(WHOLE[at : at + size] for at in range(0, len(WHOLE), size)) == LIST


def test_bytes_of_a_list_and_of_forms_are_as_they_were() -> None:
    assert list_digest(list_chunks([b"a" * CHUNK_NBYTES, b"b"]), CHUNK_NBYTES + 1) == (
        "129b1594bac64d36e6046270e0ed81ea655cf349a8d7f651afce2fc739588238"
    )
    assert to_form(b"ab").hex() == "006162"
    assert NUMBER.pack(258).hex() == "02010000"


@pytest.mark.parametrize("data", [b"x" * CHUNK_NBYTES, random.Random(2).randbytes(CHUNK_NBYTES), chunk(3), b"z"])
def test_a_chunk_comes_back_from_its_form(data: bytes) -> None:
    assert from_form(to_form(data), len(data)) == data
    assert len(to_form(data)) <= len(data) + 1


@pytest.mark.parametrize(
    "answer",
    [b"", b"\x00", b"\x02" + bytes(100), b"\x00" + bytes(99), b"\x00" + bytes(101), b"\x01" + bytes(99)]
    + [b"\x01" + zstd.write_text_frame(bytes(size)) for size in (99, 101, 1 << 26)]
    + [b"\x01" + zstd.write_text_frame(bytes(100)) + b"more", b"\x01" + zstd.write_text_frame(bytes(100))[:-1]],
)
def test_an_answer_that_is_no_chunk_of_that_size_is_refused(answer: bytes) -> None:
    with pytest.raises(PayloadError):
        from_form(answer, 100)


@pytest.mark.parametrize("question", [b"\x00", NUMBER.pack(CHUNKS), NUMBER.pack(2**32 - 1)])
def test_a_member_answers_no_question_for_what_there_is_not(question: bytes) -> None:
    with pytest.raises(PayloadError):
        trio.run(donor_of(WHOLE).answer, b"peer", question)


@pytest.mark.parametrize(
    ("text", "question"),
    [(b"", b""), (WHOLE + b"!", b""), (WHOLE + b"!", NUMBER.pack(0)), (WHOLE[:-1], NUMBER.pack(0))],
)
def test_a_member_whose_text_is_not_that_of_the_terms_gives_nothing_of_it(text: bytes, question: bytes) -> None:
    with pytest.raises(TransportError, match="not the one whose chunks the terms name"):
        trio.run(donor_of(text).answer, b"peer", question)


def test_a_member_digests_and_packs_aside_from_its_rounds() -> None:
    aside: list[object] = []

    async def noted(work: Callable[[*Ts], T], *args: *Ts) -> T:
        aside.append(work)
        return work(*args)

    donor = TextDonor(MemoryNetwork().transport(Signer(bytes(32))), TERMS, offload=noted)
    donor.text = memoryview(WHOLE)
    for question in (NUMBER.pack(0), b"", NUMBER.pack(1)):
        trio.run(donor.answer, b"peer", question)
    assert aside == [donor._list_own, to_form, to_form]
