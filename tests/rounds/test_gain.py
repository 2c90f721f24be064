"""When packing a chunk gains time: over a way of a rate, with processors that have a rate, too."""

import pytest

from decentral.rounds.snapshots import Gain

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


@pytest.mark.parametrize("mbit", [1, 20, 100, 400, 600])
def test_a_way_that_is_the_narrow_part_is_spared_a_sixth_of_the_bytes(mbit: float) -> None:
    way = Way(mbit * MBIT)
    assert way.fetch() < 1.02
    assert way.packed > 0.85 * CHUNKS


@pytest.mark.parametrize("busy", [1, 3, 8])
def test_a_processor_that_is_the_narrow_part_is_spared_the_packing_however_slow_it_makes_the_bytes(busy: float) -> None:
    way = Way(10_000 * MBIT, busy)
    assert way.fetch() < 1.03
    assert way.packed < 0.15 * CHUNKS


def test_a_thin_line_has_no_chunk_as_it_is() -> None:
    way = Way(20 * MBIT)
    way.fetch()
    assert way.packed == CHUNKS


def test_a_way_that_turns_thin_has_packed_chunks_again() -> None:
    way = Way(10_000 * MBIT)
    way.fetch()
    way.rate, way.packed = 20 * MBIT, 0
    way.fetch()
    assert way.packed > CHUNKS / 2


def test_a_processor_that_gets_busy_has_them_as_they_are() -> None:
    way = Way(400 * MBIT)
    way.fetch()
    way.busy, way.packed = 8.0, 0
    way.fetch()
    assert way.packed < CHUNKS / 2


def test_chunks_that_wait_for_each_other_a_while_change_nothing() -> None:
    way = Way(20 * MBIT)
    for number in range(CHUNKS):
        way.now += 0.5 * (number % 50 == 0)
        way.one()
    assert way.packed == CHUNKS


def test_forms_that_come_alike_are_no_reason_to_change() -> None:
    gain = Gain()
    forms = []
    for number in range(CHUNKS):
        forms.append(gain.better)
        gain.came(CHUNK, 0.01 * number, packed=gain.packed)
    assert all(forms)


def test_time_that_stands_still_is_no_reason_to_fail() -> None:
    gain = Gain()
    for _ in range(CHUNKS):
        gain.came(CHUNK, 0.0, packed=gain.packed)
    assert gain.better
