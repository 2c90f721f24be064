"""When packing a chunk gains time: over a way of a rate, with processors that have a rate, too."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import anyio
import psutil
import pytest
import torch

from decentral.consensus.chain import Head
from decentral.errors import PayloadError, TransportError
from decentral.parameters.schema import MAX_FRAGMENTS
from decentral.rounds.catch_up import CatchUp
from decentral.rounds.snapshots import DISTRUST, IDLE, KEPT, Donor, Gain, Layouts, SnapshotFetch
from decentral.simulate.virtual_time import run_in_virtual_time
from decentral.state.snapshot import Layout, Snapshot, SnapshotIndex
from decentral.wire.messages import MAX_PEERS
from tests.kit.machines import START
from tests.kit.replicas import remembering_replica

CHUNK = 1 << 18  # bytes
PACKED = round(0.833 * CHUNK)
CHUNKS = 400  # 100 MB
LOOPBACK = 1.85e8  # bytes/s of a processor that does both ends
MBIT = 125_000.0  # bytes/s


class Way:
    """Chunks that come over a way, while processors that may be busy send, receive, pack and unpack them.

    Whichever is the narrower sets the time of a chunk: the one goes on while the other works.
    """

    def __init__(self, rate: float, busy: float = 1.0) -> None:
        self.rate, self.busy = rate, busy  # bytes/s; times longer that a processor takes
        self.now, self.packed = 0.0, 0
        self.gain = Gain()

    def seconds(self, packed: bool) -> float:
        nbytes = PACKED if packed else CHUNK
        return max(nbytes / self.rate, self.busy * (nbytes / LOOPBACK + packed * 6e-4))

    def one(self) -> None:
        packed = self.gain.packed
        self.packed += packed
        self.now += self.seconds(packed)
        if packed:
            self.gain.unpacked(PACKED, CHUNK, 1.5e-4 * self.busy)
        self.gain.came(CHUNK, self.now, packed=packed)

    def fetch(self, chunks: int = CHUNKS) -> float:
        """Seconds, over those of the better form."""
        for _ in range(chunks):
            self.one()
        return self.now / (chunks * min(self.seconds(False), self.seconds(True)))


@pytest.mark.parametrize(("mbit", "share"), [(1, 0.85), (20, 1.0), (100, 0.85), (400, 0.85), (600, 0.85)])
def test_a_way_that_is_the_narrow_part_is_spared_a_sixth_of_the_bytes(mbit: float, share: float) -> None:
    way = Way(mbit * MBIT)
    assert way.fetch() < 1.02
    assert way.packed >= share * CHUNKS


@pytest.mark.parametrize("busy", [1, 3, 8])
def test_a_processor_that_is_the_narrow_part_is_spared_the_packing_however_slow_it_makes_the_bytes(busy: float) -> None:
    way = Way(10_000 * MBIT, busy)
    assert way.fetch() < 1.03
    assert way.packed < 0.15 * CHUNKS


@pytest.mark.parametrize(
    ("before", "after", "busy", "mostly_packed"), [(10_000, 20, 1.0, True), (400, 400, 8.0, False)]
)
def test_a_way_that_turns_thin_has_packed_chunks_again_and_a_processor_that_gets_busy_has_them_as_they_are(
    before: float, after: float, busy: float, mostly_packed: bool
) -> None:
    way = Way(before * MBIT)
    way.fetch()
    way.rate, way.busy, way.packed = after * MBIT, busy, 0
    way.fetch()
    assert (way.packed > CHUNKS / 2) is mostly_packed


def test_chunks_that_wait_for_each_other_a_while_change_nothing() -> None:
    way = Way(20 * MBIT)
    for number in range(CHUNKS):
        way.now += 0.5 * (number % 50 == 0)
        way.one()
    assert way.packed == CHUNKS


@pytest.mark.parametrize("seconds", [0.01, 0.0])
def test_forms_that_come_alike_and_time_that_stands_still_are_no_reason_to_change(seconds: float) -> None:
    gain = Gain()
    for number in range(CHUNKS):
        assert gain.better
        gain.came(CHUNK, seconds * number, packed=gain.packed)


# ---- test layouts ----
#
# Which tensors a snapshot has, where receivers remember: by the local model and a donor's word, which is bounded.

MEMBERS = tuple(bytes([n]) * 32 for n in range(5))
HEAD = replace(START, members=MEMBERS)


def donor_of(*senders: int):
    replica = remembering_replica()
    replica.senders.book(0, {MEMBERS[n]: {"sent": torch.full((16,), float(n))} for n in senders})
    return replica


@pytest.mark.parametrize("senders", [(), (0,), (4,), (0, 2, 4), (0, 1, 2, 3, 4)])
def test_a_joiner_sizes_a_snapshot_by_what_its_index_says_of_senders(senders):
    donor = donor_of(*senders)
    made = Snapshot(donor.shared_tensors(), Layouts(donor).document(MEMBERS))
    data, joiner = made.index.to_bytes(), Layouts(remembering_replica())
    layout = joiner.of(SnapshotIndex.document(data), HEAD)
    assert layout == Layout.of(donor.shared_tensors())
    assert SnapshotIndex.from_bytes(data, layout).hashes == made.index.hashes
    assert len(data) <= joiner.longest_index


@pytest.mark.parametrize(
    "told",
    [
        None,
        {},
        "1f",
        [],
        ["1", "1"],
        [1],
        [""],
        ["20"],
        ["01"],
        ["1F"],
        ["-1"],
        [" 1"],
        ["0x1"],
        ["1_0"],
        ["f" * 64],
        [[]],
    ],
    ids=repr,
)
def test_what_an_index_says_of_senders_in_any_other_way_is_refused(told):
    with pytest.raises(PayloadError, match="use another donor"):
        Layouts(remembering_replica()).of({} if told is None else {"senders": told}, HEAD)


def test_a_snapshot_of_more_members_than_fit_into_memory_is_refused_before_room_is_made(monkeypatch):
    memory = SimpleNamespace(total=8 * 16 * 8)  # anchor, momentum and six senders, twice
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    many = replace(START, members=tuple(bytes([n]) * 32 for n in range(7)))
    layouts = Layouts(remembering_replica())
    assert layouts.of({"senders": ["3f"]}, many).nbytes == 4 * 16 * 8
    with pytest.raises(PayloadError, match="this machine cannot hold 2 copies"):
        layouts.of({"senders": ["7f"]}, many)


@pytest.mark.parametrize("feedback", [pytest.param("ef21", marks=pytest.mark.long), "none"])
def test_the_largest_run_there_may_be_can_be_joined(feedback):
    """Its donors raised ConfigError: the document had room for 480 members and 240 fragments of ef21."""
    members = tuple(n.to_bytes(32, "big") for n in range(MAX_PEERS))
    most = 2**63 - 1
    counts = {"epoch": most, "round": most, "outer_step": most, "tokens": most, "contributions": most}
    head = replace(START, members=members, newcomers=frozenset(members), **counts)
    replica = remembering_replica(feedback, fragments=MAX_FRAGMENTS)
    kept = {peer: {"sent": torch.zeros(16)} for peer in members}
    for fragment in range(MAX_FRAGMENTS if feedback == "ef21" else 0):
        replica.senders.book(fragment, kept)
    layouts = Layouts(replica)
    made = Snapshot({"anchor/0": torch.zeros(1)}, {"head": head.to_dict(), **layouts.document(members)}).index
    found = SnapshotIndex.document(made.to_bytes())
    assert Head.from_dict(found["head"]) == head
    assert len(made.to_bytes()) <= layouts.longest_index
    if feedback == "ef21":
        assert set(found["senders"]) == {"f" * (MAX_PEERS // 4)}


def test_where_receivers_keep_nothing_a_snapshot_is_what_it_was():
    layouts, replica = Layouts(remembering_replica("none")), remembering_replica("none")
    assert layouts.document(MEMBERS) == {}
    assert layouts.of({"senders": ["1f"]}, HEAD) == Layout.of(replica.shared_tensors())
    assert layouts.longest_index == SnapshotIndex.max_nbytes(layouts.least)


def test_an_index_that_ends_inside_its_document_is_refused():
    data = Snapshot(remembering_replica().shared_tensors(), {"senders": ["0"]}).index.to_bytes()
    for nbytes in (0, 20, 47, 60):
        with pytest.raises(PayloadError):
            SnapshotIndex.document(data[:nbytes])


# ---- test what a donor gives, and who is asked for it ----


async def at_once(work, *given):
    return work(*given)


class Standing(SimpleNamespace):
    """The state of a peer that stands at a head, as its donor and its fetches read it."""

    def __init__(self, **given) -> None:
        tasks, replica = SimpleNamespace(spawn=lambda *_: True), donor_of(0)
        parts = {"replica": replica, "partners": None, "offload": at_once, "tasks": tasks, "running": True}
        super().__init__(**parts | {"head": HEAD, "me": MEMBERS[0], "gossips": False} | given)
        self.on_event = lambda *_: None


def donor_at(standing: Standing) -> Donor:
    return Donor(standing, SimpleNamespace(serve=lambda *_: None, letters=None))


def head_of(number: int) -> Head:
    return replace(HEAD, hash=bytes([number]) * 32)


def test_a_donor_gives_the_head_where_it_stands_and_not_one_of_the_branch_that_it_left_in_the_same_round():
    async def script():
        standing = Standing()
        donor = donor_at(standing)
        left, again = await donor._snapshot(), await donor._snapshot()
        assert left is again, "made once"
        standing.head = head_of(7)
        assert (await donor._snapshot()).index.meta["head"] == standing.head.to_dict()
        assert len(donor.snapshots) == 2, "whoever fetches the other goes on"

    anyio.run(script)


def test_of_more_snapshots_than_are_kept_that_goes_of_which_nothing_was_asked_for_longest():
    async def script():
        standing, made = Standing(), list[bytes]()
        donor = donor_at(standing)
        for number in range(KEPT + 2):
            standing.head = head_of(number)
            made.append((await donor._snapshot()).index.digest)
            assert await donor._chunk(made[0], 0), "whoever fetches the first one goes on"
        assert set(donor.snapshots) == {made[0], *made[-KEPT + 1 :]}

    anyio.run(script)


def test_a_snapshot_that_somebody_is_fetching_is_kept_and_goes_a_while_after():
    async def script():
        async with anyio.create_task_group() as group:
            donor = donor_at(Standing(tasks=SimpleNamespace(spawn=group.start_soon)))
            name = (await donor._snapshot()).index.digest
            for _ in range(3):
                await anyio.sleep(IDLE - 5.0)
                assert await donor._chunk(name, 0)
            await anyio.sleep(IDLE - 5.0)
            assert donor.snapshots == (name,)
            await anyio.sleep(10.0)
            assert donor.snapshots == ()

    run_in_virtual_time(script, seed=0)


def fetch_of(me: bytes, *ahead: bytes) -> SnapshotFetch:
    live = {peer: SimpleNamespace(round=HEAD.round, digest=HEAD.hash) for peer in ahead}
    swarm = SimpleNamespace(transport=None, directory=SimpleNamespace(live=lambda: live))
    return SnapshotFetch(Standing(me=me), swarm, None)


def test_each_joiner_asks_the_donors_in_an_order_of_its_own_behind_the_one_that_it_found(monkeypatch):
    monkeypatch.setattr(anyio, "current_time", lambda: 0.0)
    orders = [fetch_of(bytes([me]) * 32, *MEMBERS)._donors(MEMBERS[2], HEAD) for me in range(20, 40)]
    assert all(order[0] == MEMBERS[2] and sorted(order) == sorted(MEMBERS) for order in orders)
    assert len({order[1] for order in orders}) == len(MEMBERS) - 1, "not all of them ask the same few"


def test_who_sent_what_the_index_does_not_name_is_asked_for_nothing_for_a_while_and_not_for_ever(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(anyio, "current_time", lambda: now[0])
    fetch, (first, liar, slow) = fetch_of(MEMBERS[0], *MEMBERS[1:4]), MEMBERS[1:4]
    fetch._drop(liar, PayloadError("not what the index names"))
    fetch._drop(slow, TransportError("no answer"))
    assert set(fetch._donors(first, HEAD)) == {first, slow}
    now[0] += DISTRUST - 1.0
    assert liar not in fetch._donors(first, HEAD)
    now[0] += 2.0
    assert liar in fetch._donors(first, HEAD), "memory errs, too"


def test_of_others_those_ahead_are_asked_first_and_of_them_members_before_newcomers():
    member, newcomer, behind = MEMBERS[1], bytes([9]) * 32, MEMBERS[2]
    rounds = {behind: HEAD.round, newcomer: HEAD.round + 2, MEMBERS[0]: HEAD.round + 2, member: HEAD.round + 1}
    live = {peer: SimpleNamespace(round=round_) for peer, round_ in rounds.items()}
    asking = SimpleNamespace(directory=SimpleNamespace(live=lambda: live))
    assert CatchUp._others(asking, MEMBERS[0], HEAD) == [member, newcomer, behind]
