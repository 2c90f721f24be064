"""What is read out of counters: rates and paths, without a network."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from tests.natlab.meter import FRAMES, best_second, mean_share, paths

UPLINKS = {1: 10.0, 2: 100.0}  # Mbit/s


def samples():
    """Household 1 sends 0.5 MB in the second second, household 2 sends 5 MB evenly over four."""
    early = [(n / 10, {1: 0, 2: 125_000 * n}) for n in range(11)]
    busy = [(n / 10, {1: 50_000 * (n - 10), 2: 125_000 * n}) for n in range(11, 21)]
    late = [(n / 10, {1: 500_000, 2: 125_000 * n}) for n in range(21, 41)]
    return early + busy + late


def test_the_best_second_is_that_of_the_uplink_used_most():
    mbit, share = best_second(samples(), UPLINKS)
    assert (mbit, share) == (pytest.approx(4.0), pytest.approx(0.4))


def test_a_second_that_was_not_seen_whole_is_no_best_second():
    assert best_second(samples()[:10], UPLINKS) == (0.0, 0.0)


def test_the_mean_counts_the_time_in_which_nothing_was_sent():
    assert mean_share(samples(), UPLINKS, 0.0, 4.0) == pytest.approx(0.1)
    assert mean_share(samples(), UPLINKS, 9.0, 9.5) == 0.0


SEATS = {"server": (1, True), "alice": (2, False), "bob": (3, False), "carol": (3, False)}
STAGE = SimpleNamespace(
    relay=SimpleNamespace(number=9),
    hosts={name: SimpleNamespace(number=number) for name, (number, _) in SEATS.items()},
    public=lambda name: SEATS[name][1],
)


@pytest.mark.parametrize(
    ("flows", "pair", "path"),
    [
        ({(1, 2, "tcp"): 2 * FRAMES}, "server-alice", "direct"),
        ({(2, 3, "tcp"): FRAMES, (3, 2, "tcp"): 1}, "alice-bob", "punched"),
        (
            {(2, 3, "udp"): FRAMES // 2, (1, 2, "tcp"): 2 * FRAMES, (3, 1, "tcp"): 2 * FRAMES},
            "alice-bob",
            "through server",
        ),
        ({(3, 3, "home"): 2 * FRAMES}, "bob-carol", "at home"),
        ({(3, 1, "tcp"): 2 * FRAMES}, "bob-carol", "through server"),
        ({(9, 2, "tcp"): 2 * FRAMES, (3, 9, "tcp"): 2 * FRAMES}, "alice-bob", "relayed"),
        ({(1, 2, "tcp"): 2 * FRAMES}, "alice-bob", "some other way"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_a_path_is_where_the_bytes_went(flows, pair, path):
    assert paths(STAGE, Counter(flows), lambda a, b: True)[pair] == path


def test_peers_that_never_committed_each_others_frames_have_no_path_whatever_they_sent():
    assert set(paths(STAGE, Counter({(2, 3, "tcp"): 9 * FRAMES}), lambda a, b: False).values()) == {"none"}
