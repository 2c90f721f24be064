"""The judge is judged: logs of a run that never was, all well at first, then with one thing wrong in each."""

from __future__ import annotations

import pytest

from tests.chaos.checker import REBIRTH_WITHIN, RESUME_WITHIN, Observed, judge
from tests.chaos.evidence import Evidence
from tests.chaos.report import table

PEERS = ("peer0", "peer1", "peer2")
MINUTES = 40
EVERY = 2.0  # s between two commits


def record(round_: int) -> str:
    return f"{round_:064x}"


class Tale:
    """Three peers that commit every two seconds for forty minutes; tests spoil it."""

    def __init__(self) -> None:
        self.evidence = Evidence()
        self.log: list[dict[str, object]] = []
        self.samples: list[dict[str, object]] = []
        for name in PEERS:
            rows = [self.event("joined", 0, 0.0)]
            rows += [self.event("commit", n, EVERY * n) for n in range(1, int(60 * MINUTES / EVERY) + 1)]
            self.evidence.events[name] = rows
        for at in range(0, 60 * MINUTES, 5):
            for peer in range(len(PEERS)):
                self.samples.append(self.sample(float(at), peer, 2e8, 40))

    def event(self, kind: str, round_: int, at: float) -> dict[str, object]:
        where = {"at": round_} if kind == "joined" else {"round": round_}
        return {"event": kind, "mono": at, "record": record(round_), "anchor": f"a{round_}", **where}

    def sample(self, at: float, peer: int, rss: float, fds: int) -> dict[str, object]:
        wobble = 1e4 * (hash((at, peer)) % 7)
        fields = {"rss": rss + wobble, "anonymous": rss + wobble, "fds": fds, "threads": 9}
        return {"mono": at, "kind": "peer", "peer": peer, "pid": 100 + peer, **fields}

    def did(self, event: str, peer: int | None, at: float, **fields: object) -> None:
        self.log.append({"mono": at, "event": event, "peer": peer, "done": True, **fields})
        self.log.sort(key=lambda row: row["mono"])  # type: ignore[arg-type, return-value]

    def silence(self, name: str, begin: float, end: float) -> None:
        """This peer wrote no commit in between."""
        rows = self.evidence.events[name]
        self.evidence.events[name] = [row for row in rows if not begin < row["mono"] < end]

    def violations(self, **observed: object) -> list[str]:
        for name, rows in self.evidence.events.items():
            for row in rows:
                if row["event"] != "joined":
                    self.evidence.saw_record(row["round"], row["record"], name)
                self.evidence.saw_anchor(row["record"], row["anchor"], name)
        whole = Observed(self.evidence, self.log, 0.0, 60.0 * MINUTES, self.samples, **observed)
        judgement = judge(whole)
        assert table(judgement)
        return judgement.violations


@pytest.fixture
def tale() -> Tale:
    return Tale()


def test_a_run_in_which_all_is_well_has_no_violation(tale):
    tale.did("kill", 1, 100.0)
    tale.did("ended", 1, 100.1, code=-9)
    tale.did("start", 1, 101.0)
    tale.did("kill_daemon", 2, 200.0)
    assert tale.violations() == []


def test_two_records_of_one_round_are_found_also_when_one_is_in_the_journal_of_a_dead_peer(tale):
    tale.evidence.saw_record(17, record(10**6), "peer9's journal")
    assert any("round 17 has 2 records" in line and "peer9's journal" in line for line in tale.violations())


def test_two_anchors_after_one_record_are_found(tale):
    tale.evidence.saw_anchor(record(23), "another", "peer1")
    assert any("2 anchors" in line for line in tale.violations())


def test_more_than_a_minute_without_a_commit_is_found_wherever_it_begins(tale):
    for name in PEERS:
        tale.silence(name, 95.0, 157.0)
    assert any("no commit for" in line for line in tale.violations())


def test_the_death_of_everybody_may_be_silent_but_not_for_ever(tale):
    for name in PEERS:
        tale.silence(name, 100.0, 100.0 + 0.9 * REBIRTH_WITHIN)
    tale.did("everybody", None, 100.0)
    assert tale.violations() == []
    for name in PEERS:
        tale.silence(name, 100.0, 110.0 + REBIRTH_WITHIN)
    assert any("death of everybody" in line for line in tale.violations())


def test_a_peer_that_is_started_and_never_commits_again_is_found(tale):
    tale.did("start", 2, 300.0)
    tale.silence("peer2", 300.0, 600.0)
    assert any("peer2, start at second 300" in line for line in tale.violations())


def test_a_peer_that_is_hit_again_before_its_time_is_over_is_not(tale):
    tale.did("start", 2, 300.0)
    tale.did("kill", 2, 300.0 + 0.5 * RESUME_WITHIN)
    tale.silence("peer2", 300.0, 600.0)
    assert tale.violations() == []


def test_a_peer_that_comes_back_lower_than_it_was_is_found_unless_its_disk_was_damaged(tale):
    rows = tale.evidence.events["peer1"]
    rows.insert(101, tale.event("joined", 90, 200.5))
    assert any("had applied round 100 and came back at 90" in line for line in tale.violations())
    tale.did("cut", 1, 200.2)
    assert tale.violations() == []


@pytest.mark.parametrize(("what", "per_sample"), [("anonymous", 2e5), ("fds", 0.5)])
def test_memory_and_descriptors_that_grow_are_found(tale, what, per_sample):
    for row in tale.samples:
        row[what] += per_sample * row["mono"] / 5
    assert any(line.startswith(f"{what} of peers grows") for line in tale.violations())


def test_a_restart_with_more_memory_is_no_growth(tale):
    for row in tale.samples:
        if row["mono"] > 1100:
            row["pid"] += 50
            row["anonymous"] += 1e8
    assert tale.violations() == []


def test_strays_mounts_and_surprises_are_told(tale):
    found = tale.violations(strays=["77 p2pd"], mounts=["/x/peer5"], surprises=["peer1 ended by itself"])
    assert found == ["peer1 ended by itself", "stray process 77 p2pd", "still mounted: /x/peer5"]
