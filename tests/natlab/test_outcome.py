"""What the runner makes of the peers' events, and how it says so."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from tests.natlab.meter import FRAMES, best_second, mean_share, paths
from tests.natlab.outcome import Outcome, shared_records
from tests.natlab.pairs import Found, summary
from tests.natlab.run import line, path_of, remark, row
from tests.natlab.scenarios import TABLE

NAMES = {"alice": "A", "bob": "B"}


def commit(number, contributors="AB", anchor="same", mono=0.0):
    fields = {"contributors": list(contributors), "anchor": anchor, "mono": mono}
    return {"event": "commit", "round": number, **fields}


def test_a_round_counts_once_every_peer_has_it_behind_itself_be_it_by_catching_up():
    alice = [commit(1), commit(2), commit(3), commit(4)]
    bob = [commit(1), {"event": "resynced", "round": 3}]
    assert [(rows[0]["round"], len(rows)) for rows in shared_records([alice, bob])] == [(1, 2), (2, 1), (3, 1)]
    assert shared_records([alice, [{"event": "joined"}]]) == []


def test_changes_of_the_membership_are_no_rounds():
    changed = {"event": "membership", "round": 1}
    assert [rows[0]["round"] for rows in shared_records([[changed, commit(2)], [changed, commit(2)]])] == [2]


def test_records_are_counted_by_whose_frames_they_name():
    found = Outcome("x", None, asked=3)
    rounds = [commit(1, "A", mono=4.0), commit(2, mono=5.0), commit(3, "B", mono=6.0)]
    found.judge(shared_records([rounds, rounds]), NAMES, began=1.0)
    assert (found.committed, found.with_all, found.contributed) == (3, 1, {"alice": 2, "bob": 2})
    assert found.first_frame == 4.0
    assert found.equal


def test_two_peers_with_other_anchors_after_the_same_round_are_unequal():
    found = Outcome("x", None, asked=1)
    found.judge(shared_records([[commit(1)], [commit(1, anchor="another")]]), NAMES, began=0.0)
    assert not found.equal


def test_a_scenario_works_when_all_peers_committed_every_round_alike():
    good = Outcome("x", None, asked=12, committed=12, with_all=12)
    assert good.works
    assert not Outcome("x", None, asked=12, committed=11, with_all=11).works
    assert not Outcome("x", None, asked=12, committed=12, with_all=8).works
    assert not Outcome("x", None, asked=12, committed=12, with_all=12, equal=False).works
    assert not Outcome("x", None, asked=12, committed=12, with_all=12, ends={"bob": "exit 1: no"}).works


def test_what_is_wrong_missing_or_better_than_marked_is_said():
    assert remark(Outcome("x", None, asked=12, committed=12, with_all=12)) == ""
    assert remark(Outcome("x", None, asked=12)) == "DOES NOT WORK"
    assert remark(Outcome("x", "a relay", asked=12)) == "missing: a relay"
    assert remark(Outcome("x", "a relay", asked=12, committed=12, with_all=12)) == "works now: take its mark away"
    assert "UNEQUAL" in remark(Outcome("x", None, asked=12, committed=12, with_all=12, equal=False))


def test_the_paths_of_a_scenario_are_shown_worst_first():
    found = Outcome("x", None, 1, paths={"a-b": "direct", "a-c": "through server", "b-c": "none", "a-d": "direct"})
    assert path_of(found) == "none, through server, direct"
    assert line(row(found)).split()[0] == "x"


def test_every_scenario_has_its_own_name_and_trouble_for_somebody_who_is_there():
    assert len({scenario.name for scenario in TABLE}) == len(TABLE)
    for scenario in TABLE:
        names = [seat.name for seat in scenario.seats]
        assert len(set(names)) == len(names)
        trouble = scenario.trouble
        there = [*names, ""] if scenario.relay is not None else names
        assert trouble is None or trouble.seat in there


def test_the_runs_of_a_pair_are_counted_by_path_with_the_medians_of_those_that_have_one():
    runs = [Found("x", "punched", 0.2, 1.0, 17.0), Found("x", "punched", 0.4, 3.0, 19.0), Found("x", "relayed", 0.3)]
    assert summary("x", runs).split() == ["x", "2", "punched,", "1", "relayed", "0.3", "s", "2.0", "s", "18.0"]
    assert summary("x", [Found("x", "none")]).split() == ["x", "1", "none", "-", "-", "-"]


# ---- what is read out of counters: rates and paths, without a network ----


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
