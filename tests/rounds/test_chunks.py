"""When packing a chunk is worth its time."""

import pytest

from decentral.rounds.chunks import Gain

CHUNK = 1 << 18  # bytes
PACKED = round(0.833 * CHUNK)


def after(rate: float, unpacking: float = 1.5e-4, chunks: int = 20) -> Gain:
    """Packed chunks that came at so many bytes/s, unpacked in so many seconds each; and the time is what it is."""
    gain = Gain(began=0.0)
    for _ in range(chunks):
        gain.came(PACKED, CHUNK, unpacking, packed=True)
    gain.began = -gain.arrived / rate  # so that it is 0 now
    return gain


@pytest.mark.parametrize(("mbit", "pays"), [(5, True), (100, True), (500, True), (2000, False), (10_000, False)])
def test_it_is_up_to_some_hundred_megabits(mbit: float, pays: bool) -> None:
    assert after(mbit * 125_000.0).pays(0.0) is pays


def test_it_is_tried_before_anything_is_known_and_again_after_plain_chunks() -> None:
    gain = Gain(began=0.0)
    assert gain.pays(0.0)
    gain.came(CHUNK + 1, CHUNK, 0.0, packed=False)
    assert gain.pays(0.001)


def test_one_slow_unpacking_on_a_busy_machine_changes_nothing() -> None:
    gain = after(20 * 125_000.0)
    gain.came(PACKED, CHUNK, 0.5, packed=True)
    assert gain.pays(0.0)


def test_it_is_given_up_on_a_machine_that_unpacks_more_slowly_than_bytes_come() -> None:
    assert not after(20 * 125_000.0, unpacking=0.05).pays(0.0)


def test_chunks_are_packed_again_when_the_way_turns_out_to_be_slow() -> None:
    gain = after(10_000 * 125_000.0)
    assert not gain.pays(0.0)
    assert gain.pays(10.0)
