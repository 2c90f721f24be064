"""The match against what a user would pick instead: experiments/contestants, no part of a source distribution."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch

terms = pytest.importorskip("experiments.contestants.terms")
outcome = pytest.importorskip("experiments.contestants.outcome")
results = pytest.importorskip("experiments.contestants.results")
report = pytest.importorskip("experiments.contestants.report")
loop = pytest.importorskip("experiments.contestants.loop")
seats = pytest.importorskip("experiments.contestants.seat")

Match = terms.Match


def peer(rank: int, ended: str = "done", bits: float = 3.0, **changed):
    curve = [(0.0, 0, 0, 8.0), (90.0, 100, 1_000_000, bits)]
    given = {"curve": curve, "steps": 100, "first": 0.6, "last": 179.0, "pause": 1.0, "computing": 50.0, "overrun": 0.0}
    return outcome.Peer(rank=rank, ended=ended, sent=1_000_000, **given | changed)


def result(contestant: str, knob, *peers, **changed):
    given = {"mbit": 20.0, "seconds": 180.0} | changed
    return results.Result(Match(contestant=contestant, knob=knob, **given), list(peers), 1.0)


def test_a_match_with_churn_kills_the_last_peer_at_a_third_and_lets_another_join_at_half():
    kill, join = terms.events(Match(contestant="ddp", knob="none", seconds=90.0, churn=True))
    assert (kill.what, kill.at, kill.rank) == ("kill", 30.0, 3)
    assert (join.what, join.at, join.rank) == ("join", 45.0, 4)


def test_a_quiet_match_has_no_events():
    assert terms.events(Match(contestant="ddp", knob="none")) == []


def batch(contestant: str, rank: int, step: int, tmp_path: Path):
    seat = seats.Seat(
        match=Match(contestant=contestant, knob=10),
        rank=rank,
        address="127.0.0.1",
        first_address="127.0.0.1",
        interface="lo",
        folder=str(tmp_path),
    )
    model = torch.nn.Linear(1, 1)
    train = torch.arange(5000).remainder(251).to(torch.uint8)
    one = loop.Loop(seat, loop.Entered(model, None), model, train, io.StringIO())
    one.step = step
    return one._batch()["input_ids"]


def test_every_contestant_sees_the_same_data_in_the_same_order_and_every_rank_its_own(tmp_path):
    ours, theirs = (batch(name, 1, 7, tmp_path) for name in ("sparseloco", "hivemind"))
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, batch("sparseloco", 2, 7, tmp_path))
    assert not torch.equal(ours, batch("sparseloco", 1, 8, tmp_path))


def test_every_contestant_has_a_worker_and_a_search_of_the_same_size():
    worker = pytest.importorskip("experiments.contestants.worker")
    assert set(worker.MODULES) == set(terms.KNOBS) == set(report.TITLES)
    assert {len(values) for values in terms.KNOBS.values()} == {3}


def test_a_line_that_a_kill_tore_is_left_out(tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_text(json.dumps({"at": 1.0}) + '\n{"at": 2.')
    assert list(outcome.read_lines(path)) == [{"at": 1.0}]


def test_what_a_peer_was_without_a_step_at_the_end_counts_as_a_pause():
    lines = [{"at": 2.0, "loss": 5.0, "seconds": 0.5, "computed": 0.7, "sent": 9, "step": 1}]
    match = Match(contestant="ddp", knob="none", seconds=60.0)
    found = outcome.peer_of(match, 0, lines, {}, "silent")
    assert found.pause == 58.0
    assert found.overrun == pytest.approx(0.2)
    assert found.computing == 0.5
    assert outcome.peer_of(match, 0, lines, {}, "killed").pause == 0.5


def test_the_knob_of_a_match_is_the_one_that_its_search_found_best():
    search = [result("diloco", knob, peer(0, bits=bits), seconds=60.0) for knob, bits in ((10, 3.1), (20, 2.9))]
    longer = result("diloco", 40, peer(0, bits=1.0))
    assert results.best_knob([*search, longer], "diloco", 60.0) == 20
    with pytest.raises(KeyError, match="--kind search --only ddp"):
        results.best_knob(search, "ddp", 60.0)


def test_results_come_back_from_their_file_as_they_went_in(tmp_path):
    kept = result("ddp", "fp16", peer(0), peer(1, "RuntimeError: gone"))
    results.keep(tmp_path / "results.jsonl", kept)
    assert results.read(tmp_path / "results.jsonl") == [kept]


def test_the_table_of_churn_says_who_goes_on_and_what_has_to_be_started_again():
    killed = peer(3, "killed", bits=9.0)
    fine = result(
        "sparseloco", 20, peer(0), peer(1), peer(2), killed, peer(4, asked=90.0, first=99.0, bits=3.2), churn=True
    )
    gone = [peer(rank, "RuntimeError: Connection closed") for rank in range(3)]
    broken = result("ddp", "none", *gone, killed, peer(4, "silent", first=None, curve=[]), churn=True)
    table = report.markdown([broken, fine])
    assert "| decentral, `sparseloco` | 3 of 3 | 3.000 | 1.0 | 28 % | 9.0 | 3.200 | nothing |" in table
    assert "| DDP over gloo | 0 of 3 | 3.000 | 1.0 | 28 % | never |  | 3 peers, the newcomer |" in table


def test_a_peer_in_the_middle_of_a_round_goes_on_and_one_that_stood_still_for_long_does_not():
    busy, still = peer(1, "silent", last=176.0), peer(2, "silent", last=145.0)
    played = result("torchft", 40, peer(0), busy, still, peer(3, "killed"), peer(4, asked=90.0), churn=True)
    assert played.goers == [peer(0), busy]
    assert "| 2 of 3 |" in report.markdown([played])
    assert "one still waits, 35 s |" in report.markdown([played])


def test_the_table_of_a_quiet_match_names_the_setting_and_the_csv_has_every_look():
    played = [result("hivemind", 10, peer(0), peer(1, bits=3.5)), result("hivemind", 20, peer(0), seconds=60.0)]
    table = report.markdown(played)
    assert "| hivemind, local updates | target_batch_size 160 | 3.250 | 3.500 | 28 % | 100 | 1.0 | 2.0 |" in table
    assert table.index("3 minutes") < table.index("The search")
    assert len(report.as_csv(played).splitlines()) == 1 + 2 * 3


def test_the_figure_has_of_each_kind_of_match_the_longest():
    lengths = [(20.0, 180.0, False), (20.0, 1200.0, False), (20.0, 180.0, True), (100.0, 180.0, False)]
    played = [result("ddp", "fp16", mbit=mbit, seconds=seconds, churn=churn) for mbit, seconds, churn in lengths]
    assert report.longest(played) == played[1:]
